#!/usr/bin/env python3
"""Runs every test binary of the workspace, several at a time, and prints how long each took.

Most tests wait: for a broker's session to end, for a lease, for a sweep. So test binaries run beside each other.
Those that measure run last and alone. The output of a binary is printed whole when it ends, in the form of
`cargo test`, which `requirements.py` reads.

    run_tests.py <log> [arguments of the test binaries…]
"""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Test binaries at a time; each runs as many tests at a time as there are processors.
PLACES = int(os.environ.get("ONCEBOX_TEST_PLACES", "2"))
# A binary that takes longer hangs, and is killed.
MINUTES_MAX = 45
# They compare shares, latencies, pauses or memory, rest on how long a look or a loss takes, or load the machine on purpose.
ALONE = ["fairness", "many_tenants", "at_rest", "hot_swap", "hostile", "tenant_locks", "counted", "shadow", "leases"]
# The longest first, so that none of them is left over at the end.
LONGEST = ["sabotage", "crash_recovery", "cli", "docs", "first_hour", "lifecycle", "redrive", "guest_examples", "rebalance"]


def binaries():
    """The test binaries, built: path, name, and the folder that they run in."""
    build = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    lines = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    found = []
    for message in map(json.loads, lines):
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            package = pathlib.Path(message["manifest_path"]).parent
            source = pathlib.Path(message["target"]["src_path"]).relative_to(package)
            found.append((message["target"]["name"], source, message["executable"], package))
    return found


def order(binary):
    name = binary[0]
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


class Run:
    """One run of the suite: its log, and what became of each binary."""

    def __init__(self, log, arguments):
        self.log, self.arguments = log, arguments
        self.lock = threading.Lock()
        self.took, self.failed = [], []

    def say(self, text):
        with self.lock:
            sys.stdout.write(text)
            sys.stdout.flush()
            self.log.write(text)
            self.log.flush()

    def binary(self, binary):
        name, source, path, package = binary
        began = time.monotonic()
        environment = {**os.environ, "CARGO_MANIFEST_DIR": str(package)}
        try:
            done = subprocess.run([path, *self.arguments], cwd=package, env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60 * MINUTES_MAX)
            said = done.stdout.decode(errors="replace")
            if done.returncode != 0:
                self.failed.append(name)
        except subprocess.TimeoutExpired as hung:
            said = (hung.output or b"").decode(errors="replace")
            said += f"\n{name} did not end within {MINUTES_MAX} minutes, and was killed\n"
            self.failed.append(f"{name} (it did not end within {MINUTES_MAX} minutes)")
        self.took.append((time.monotonic() - began, name))
        shown = pathlib.Path(path).relative_to(ROOT) if pathlib.Path(path).is_relative_to(ROOT) else path
        self.say(f"     Running {source} ({shown})\n{said}")

    def beside_each_other(self, queue):
        def work():
            while True:
                with self.lock:
                    if not queue:
                        return
                    binary = queue.pop(0)
                self.binary(binary)

        threads = [threading.Thread(target=work) for _ in range(PLACES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main():
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} <log> [arguments of the test binaries…]")
    found = binaries()
    with open(sys.argv[1], "w") as log:
        run = Run(log, sys.argv[2:])
        run.beside_each_other(sorted((b for b in found if b[0] not in ALONE), key=order))
        for binary in (b for b in found if b[0] in ALONE):
            run.binary(binary)
    print("\nseconds  test binary")
    for seconds, name in sorted(run.took, reverse=True)[:20]:
        print(f"{seconds:7.0f}  {name}")
    if run.failed:
        sys.exit(f"failed: {', '.join(sorted(run.failed))}")


main()
