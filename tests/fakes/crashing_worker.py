"""A worker that prints sixty lines and crashes, again and again."""

import sys

for number in range(60):
    print(f"line {number} of a worker that will crash", file=sys.stderr)
sys.exit("the thirteenth bolt is missing")
