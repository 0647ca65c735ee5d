"""Readers of foreign logs, from bytes to LogTraces; `moeproxy.traces.read` is the way in.

`opening` gives files and members of archives as streams, `dispatch` says which container each is, the reader of the
container (`text` with `console` and `literals`, `tables`, `documents`, `tfevents`, `wandbfile`, `databases`) fills a
`sink` with `rows` of `cells`, and `assemble` makes traces of them with `joining` and the maps of
`moeproxy.traces.keys`.
"""
