"""Rows of the family table, one file for each kind of router. To add a family, add a row to one of them."""

from __future__ import annotations

from moeproxy.experts.family_rows import composite, sigmoid, softmax, special

ROWS = (*softmax.ROWS, *sigmoid.ROWS, *special.ROWS, *composite.ROWS)
