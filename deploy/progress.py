"""Turns cargo's progress bar into a line every 20 seconds, for logs. Reads cargo's standard error, passes on what isn't progress."""

import os
import re
import select
import sys
import time

EVERY_S = 20
BAR = re.compile(r"Building \[[^\]]*\]\s*(\d+)/(\d+)(?:: (.*))?")
# What cargo draws over and over before it builds.
FETCH = re.compile(r"^\s*(?:Fetch \[[^\]]*\]\s*(?P<index>.*)|Downloading (?P<crates>\d+ crates?.*))$")
QUIET = re.compile(r"^\s*(Compiling|Downloaded|Adding|Fresh|Dirty|Locking|Updating|Blocking) ")


def main():
    started = last = time.monotonic()
    pending = at = ""
    while True:
        # cargo says nothing while one crate takes long; a person wants to know that it goes on.
        ready, _, _ = select.select([0], [], [], 1)
        if ready:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            pending += chunk.decode(errors="replace")
            *lines, pending = re.split(r"[\r\n]", pending)
            for line in lines:
                line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).rstrip()
                bar = BAR.search(line)
                if bar:
                    done, units, names = bar.groups()
                    at = f"{done} of {units} built, now {names or '…'}"
                elif fetch := FETCH.search(line):
                    at = f"downloading {fetch['crates']}" if fetch["crates"] else f"reading the index of crates: {fetch['index']}"
                elif line and not QUIET.match(line):
                    print(line, flush=True)
        now = time.monotonic()
        if at and now - last >= EVERY_S:
            last = now
            minutes, seconds = divmod(int(now - started), 60)
            print(f"    {minutes:2}:{seconds:02}  {at}", flush=True)
    if pending.strip() and not BAR.search(pending) and not FETCH.search(pending):
        print(pending.rstrip(), flush=True)


main()
