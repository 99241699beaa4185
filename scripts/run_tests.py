#!/usr/bin/env python3
"""Runs the tests of the workspace, several files of them at a time, and prints what took longest.

Most tests wait: for a broker's session to end, for a lease, for a sweep. So a file of tests is a process, and processes
run beside each other. Files that measure run last, one by one. The output of a process is printed whole when it ends,
in the form of `cargo test`, which `requirements.py` reads.

    run_tests.py <log> [parts of names of tests…] [-- arguments of the test binaries…]
"""

import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Processes at a time, and tests at a time in each. Most wait most of the time: with three, two processors rested for a
# third of it.
PLACES = int(os.environ.get("ONCEBOX_TEST_PLACES", "4"))
THREADS = 2
# A process that takes longer hangs, and is killed.
MINUTES_MAX = 45
# They rest on how long a look or a loss takes: two at a time, the longest first.
QUIET = ["docs", "shadow", "leases", "tenant_locks", "counted"]
# They compare shares, latencies, pauses or memory.
ALONE = ["fairness", "many_tenants", "at_rest", "hot_swap", "hostile"]
# Each has hosts or defects side by side of its own: two at a time.
HEAVY = ["sabotage", "lifecycle", "upgrade"]
# The longest first, so that none of them is left over at the end.
LONGEST = [
    "browser", "first_hour", "crash_recovery", "verify", "guest_sdk", "outages", "outgoing", "redrive",
    "brokers", "tenants", "guest_languages", "own_database", "consumers", "oncebox_kafka", "benchmark",
    "endpoints", "cli", "guest_examples", "rebalance",
]
SHOWN = 20
# Set by lints.sh, for the workspace.
LINTS = ["RUSTC_WORKSPACE_WRAPPER", "CLIPPY_ARGS"]

# A folder in memory for temporary files, where it has room: commands make clusters of PostgreSQL there, which are a
# thousand files each.
MEMORY, MEMORY_BYTES = "/dev/shm", 6 << 30

Job = collections.namedtuple("Job", "name source path package tests")
ENDED = re.compile(r"^test (\S+) \.\.\. (?:.*\b)?(?:ok|FAILED)$")


def binaries():
    """The test binaries, built: source, program, and the folder that they run in."""
    build = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    lines = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    for message in map(json.loads, lines):
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            package = pathlib.Path(message["manifest_path"]).parent
            source = pathlib.Path(message["target"]["src_path"]).relative_to(package)
            yield message["target"]["name"], source, message["executable"], package


def jobs(parts):
    """A process for each file of tests, and one for all unit tests of a crate."""
    for name, source, path, package in binaries():
        listed = subprocess.run([path, "--list", "--format", "terse"], cwd=package, stdout=subprocess.PIPE, text=True, check=True)
        files = collections.defaultdict(list)
        for line in listed.stdout.splitlines():
            test, _, kind = line.rpartition(": ")
            file = test.split("::")[0] if source.parts[0] == "tests" and "::" in test else name
            if kind == "test" and (not parts or any(part in f"{file}::{test}" for part in parts)):
                files[file].append(test)
        for file, tests in files.items():
            yield Job(file, source, path, package, sorted(tests))


class Run:
    """One run of the suite: its log, and what became of each process."""

    def __init__(self, log, arguments, temporary):
        self.log, self.arguments, self.temporary = log, arguments, temporary
        self.lock = threading.Lock()
        self.processes, self.processors, self.tests, self.failed = [], [], [], []

    def say(self, text):
        with self.lock:
            sys.stdout.write(text)
            sys.stdout.flush()
            self.log.write(text)
            self.log.flush()

    def job(self, job):
        began = time.monotonic()
        # A handler that a test builds is linted nowhere.
        environment = {name: value for name, value in os.environ.items() if name not in LINTS}
        environment |= {"CARGO_MANIFEST_DIR": str(job.package), "TMPDIR": self.temporary}
        command = [job.path, f"--test-threads={THREADS}", "--exact", *job.tests, *self.arguments]
        process = subprocess.Popen(command, cwd=job.package, env=environment, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        watchdog = threading.Timer(60 * MINUTES_MAX, process.kill)
        watchdog.start()
        said = []
        # Tests begin in the order of their names, each when one before it ends.
        begins = {test: began for test in job.tests[:THREADS]}
        waiting = job.tests[THREADS:]
        for line in process.stdout:
            said.append(line.decode(errors="replace"))
            ended, now = ENDED.match(said[-1].rstrip()), time.monotonic()
            if ended and ended[1] in begins:
                self.tests.append((now - begins.pop(ended[1]), f"{job.name}: {ended[1]}"))
                if waiting:
                    begins[waiting.pop(0)] = now
        hung = not watchdog.is_alive()
        watchdog.cancel()
        # Unlike the time, what a process and its children took of the processors does not depend on what runs beside it.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.processors.append((usage.ru_utime + usage.ru_stime, job.name))
        if process.returncode != 0:
            self.failed.append(f"{job.name} (killed after {MINUTES_MAX} minutes)" if hung else job.name)
        self.processes.append((time.monotonic() - began, job.name))
        shown = pathlib.Path(job.path).relative_to(ROOT) if pathlib.Path(job.path).is_relative_to(ROOT) else job.path
        self.say(f"     Running {'unittests ' * (job.source.parts[0] != 'tests')}{job.source} ({shown})\n{''.join(said)}")

    def beside_each_other(self, places, queue):
        def work():
            while True:
                with self.lock:
                    if not queue:
                        return
                    job = queue.pop(0)
                self.job(job)

        threads = [threading.Thread(target=work) for _ in range(places)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def table(self, what, took):
        self.say(f"\nseconds  {what}\n" + "".join(f"{seconds:7.0f}  {name}\n" for seconds, name in sorted(took, reverse=True)[:SHOWN]))


def temporary_folder():
    """A new folder for temporary files, readable for the user that PostgreSQL runs as."""
    has_room = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES
    # Toolchains run what they build in such a folder.
    has_room = has_room and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    folder = tempfile.TemporaryDirectory(prefix="oncebox-", dir=MEMORY if has_room else None, ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o755)
    return folder


def main():
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} <log> [parts of names of tests…] [-- arguments of the test binaries…]")
    parts = sys.argv[2:]
    arguments = parts[parts.index("--") + 1 :] if "--" in parts else []
    parts = parts[: len(parts) - len(arguments) - 1] if "--" in parts else parts
    order = {name: place for place, name in enumerate([*LONGEST, *QUIET, *HEAVY])}
    found = sorted(jobs(parts), key=lambda job: order.get(job.name, len(order)))
    if not found:
        sys.exit(f"no test has one of these in its name: {' '.join(parts)}")
    with open(sys.argv[1], "w") as log, temporary_folder() as temporary:
        run = Run(log, arguments, temporary)
        apart = {*QUIET, *ALONE, *HEAVY}
        run.beside_each_other(PLACES, [job for job in found if job.name not in apart])
        run.beside_each_other(2, [job for job in found if job.name in QUIET])
        run.beside_each_other(2, [job for job in found if job.name in HEAVY])
        run.beside_each_other(1, [job for job in found if job.name in ALONE])
        run.table("test", run.tests)
        run.table("file of tests", run.processes)
        run.table("of a processor, file of tests", run.processors)
    if run.failed:
        sys.exit(f"failed: {', '.join(sorted(run.failed))}")


main()
