"""A long run of the mutation fuzzer, outside the suite: python -m tests.traces.fuzz_campaign [--minutes 10] [--seed 0].

Every input that breaks a rule is kept in `--out` with the error; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.traces.mutating import attempt, bytewise, check, linewise
from tests.traces.samples import SAMPLES, TEXTS

SLOW = 10.0  # seconds for one small file


def main() -> int:
    """Mutate and read until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    options = parser.parse_args()
    dice, names = random.Random(options.seed), sorted(SAMPLES)
    end, count, faults, refused = time.monotonic() + 60 * options.minutes, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            count += 1
            name = dice.choice(names)
            data = SAMPLES[name]
            is_text = name in TEXTS
            for _ in range(dice.randint(1, 3)):
                lines = is_text and dice.random() < 0.5
                data = linewise(data, list(TEXTS.values()), dice) if lines else bytewise(data, dice)
            started = time.process_time()
            try:
                logs = attempt(Path(folder), data)
                check(logs, data if is_text else None)
                refused += not logs
                assert time.process_time() - started < SLOW
            except Exception:
                faults += 1
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"{options.seed}-{count}.log").write_bytes(data)
                (options.out / f"{options.seed}-{count}.txt").write_text(f"{name}\n{traceback.format_exc()}")
    sys.stdout.write(f"{count:,} mutated logs of {len(names)} sources, {refused:,} refused, {faults} faults\n")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
