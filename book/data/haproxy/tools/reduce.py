#!/usr/bin/env python3
"""Reduce a log to the fields that are shipped, compressed the same way each time.

usage: reduce.py FULL.log.gz REDUCED.log.gz
"""

import gzip
import sys

KEPT = ("t", "te", "arm", "srv", "sq", "svc", "a", "b", "la", "lb", "n")

with gzip.open(sys.argv[1], "rt") as full:
    rows = [dict(field.split("=", 1) for field in line.split()) for line in full]
text = "".join(" ".join(f"{name}={row[name]}" for name in KEPT) + "\n" for row in rows)
# No time stamp and no name in the header: equal logs give equal files.
with (
    open(sys.argv[2], "wb") as out,
    gzip.GzipFile("", "wb", compresslevel=9, fileobj=out, mtime=0) as reduced,
):
    reduced.write(text.encode())
