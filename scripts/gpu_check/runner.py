"""Runs checks within a budget of seconds, and keeps every result as soon as it is there: its rows, its numbers, its log."""
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import tarfile
import threading
import time
import traceback

# Bytes of a log that are kept: its beginning and its end.
LOG_BYTES = 200_000
LOGS = "logs.tar.gz"
# Characters of a command's last error that its row has: a message of ours with the kernel's name is shorter.
LAST_ERROR = 200
# The driver waits for each launch, so that an error is that of the kernel that caused it.
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
ROW = ("name", "result", "detail", "check")


class OutOfBudget(Exception):
    """The next check would not end in time, or this one was ended: `output` is what it printed before."""

    def __init__(self, output=""):
        super().__init__()
        self.output = output


class Checks:
    """The results so far: rows of name, result, detail and the check that they belong to, numbers by name, and for each
    binary its tests that ended well, with whether they skipped themselves."""

    def __init__(self, out, budget, resume, facts):
        self.out, self.facts = out, facts
        self.end = time.monotonic() + budget if budget else None
        self.rows, self.numbers, self.passed, self.done, self.check = [], {}, {}, set(), ""
        self.lock, self.running = threading.Lock(), set()
        out.mkdir(parents=True, exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
        if resume and (out / "results.json").exists():
            known = json.loads((out / "results.json").read_text())
            self.numbers, self.passed, self.done = known["numbers"], known["passed"], set(known["done"])
            rows = [[row[part] for part in ROW] for row in known["checks"]]
            self.rows = [row for row in rows if row[-1] in self.done]  # the others come again
            if (out / LOGS).exists():
                with tarfile.open(out / LOGS) as archive:
                    archive.extractall(out, filter="data")

    def left(self, limit):
        """Seconds that a check may take which wants `limit`."""
        if self.end is None:
            return limit
        left = self.end - time.monotonic() - 2  # the archive is written, too
        if left < min(limit, 10):
            raise OutOfBudget
        return min(limit, left)

    def once(self, name, check):
        """Does a check unless an earlier run has: --resume."""
        if name in self.done:
            return
        self.check = name
        try:
            check()
        except OutOfBudget:
            raise
        except Exception as error:  # a fault of these scripts must not cost the other checks
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.row(name, f"FAILED ({type(error).__name__}: {error})", f"{at.filename}:{at.lineno}")
        with self.lock:
            self.done.add(name)
        self.check = ""
        self.save()
        self.pack()

    def row(self, name, result, detail=""):
        with self.lock:
            self.rows.append([name, result, detail, self.check])
        print(f"{name}: {result} ({detail})", flush=True)
        self.save()

    def number(self, name, value):
        with self.lock:
            self.numbers[name] = value
        self.save()

    def run(self, name, command, limit, environment=None, quiet=False, failed="FAILED"):
        """Runs a command. Returns its standard output, whole or as far as it came, and whether it ended well. `failed` is
        the word for one that did not."""
        wanted, limit, start = limit, self.left(limit), time.monotonic()
        log = self.out / "logs" / (re.sub(r"[^A-Za-z0-9._-]+", "-", name) + ".log")
        command = [str(word) for word in command]
        with open(log, "wb") as errors:
            try:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                                           env={**os.environ, **(environment or {})})
            except OSError as error:
                self.row(name, f"{failed} ({error})", log.name)
                return "", False
            self.running.add(process)
            try:
                output, _ = process.communicate(timeout=limit)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                code = f"no end after {limit:.0f} s"
            except BaseException:
                self.kill()
                raise
            finally:
                self.running.discard(process)
        output = output.decode(errors="replace")
        last = self.keep(log, command, output)
        if code != 0 and limit < wanted and time.monotonic() - start >= limit:
            raise OutOfBudget(output)  # the check may be sound
        took = time.monotonic() - start
        if not quiet or code != 0:
            why = f", {last}" if code != 0 and last else ""
            self.row(name, "ok" if code == 0 else f"{failed} ({code})", f"{took:.1f} s, {log.name}{why}")
        return output, code == 0

    def again(self, name, command, limit, environment=None):
        """Runs once more what failed on the GPU, so that its last error names the kernel."""
        self.run(f"{name} blocking", command, limit, {**(environment or {}), **BLOCKING}, quiet=True)

    def kill(self):
        """Ends what runs: these are sessions of their own, which hear nothing of Ctrl-C."""
        for process in list(self.running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def keep(self, log, command, output):
        """Puts a command, its output and its errors into its log, without the middle of a long one. Returns the beginning
        of the last line of its errors."""
        errors = log.read_bytes().decode(errors="replace")
        text = "$ " + " ".join(command) + "\n" + output + errors
        if len(text) > LOG_BYTES:
            text = text[: LOG_BYTES // 2] + "\n[...]\n" + text[-LOG_BYTES // 2 :]
        log.write_text(text)
        # Rust ends with notes on backtraces.
        lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("note: ")]
        return lines[-1][:LAST_ERROR] if lines else ""

    def tests(self, name, binary, limit, environment, at_once, only=None):
        """Runs each test of a binary in a process of its own, and those that fail once more, so that they name the kernel.
        Those that ended well in an earlier call are not run again."""
        listed, well = self.run(f"{name} --list", [binary, "--list"], 60, environment, quiet=True)
        tests = [line[: -len(": test")] for line in listed.splitlines() if line.endswith(": test")]
        tests = [test for test in tests if only is None or test in only]
        if not well or not tests:
            return self.row(name, "FAILED (no tests)", listed[:80].replace("\n", " "))
        known = self.passed.get(name, {})
        passed = self.passed[name] = {test: skips for test, skips in known.items() if test in tests}
        start, earlier, failed = time.monotonic(), len(passed), []

        def one(test):
            words = [binary, "--exact", test, "--nocapture"]
            output, well = self.run(f"{name} {test}", words, limit, environment, quiet=True)
            # Who ends well has run exactly one test.
            if well and "test result: ok. 1 passed" not in output:
                self.row(f"{name} {test}", "FAILED (no result)", "it ended, and did not say how")
                well = False
            if well:
                with self.lock:
                    passed[test] = "skipped:" in output
                return self.save()
            failed.append(test)
            self.again(f"{name} {test}", words, limit, environment)

        try:
            with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                try:
                    list(pool.map(one, [test for test in tests if test not in passed]))
                except BaseException as error:
                    pool.shutdown(wait=False, cancel_futures=True)
                    if not isinstance(error, OutOfBudget):
                        self.kill()
                    raise
        finally:
            detail = f"{len(passed)} of {len(tests)} tests" + (f", {earlier} in an earlier call" if earlier else "")
            detail += f", {sum(passed.values())} skipped, {time.monotonic() - start:.1f} s"
            well = "ok" if len(passed) == len(tests) else "not all"
            self.row(name, f"FAILED ({', '.join(failed)})" if failed else well, detail)

    def failed(self):
        return [name for name, result, *_ in self.rows if result.startswith("FAILED")]

    def save(self):
        with self.lock:
            report = {
                "date": datetime.date.today().isoformat(),
                **self.facts,
                "checks": [dict(zip(ROW, row)) for row in self.rows],
                "numbers": self.numbers,
                "passed": self.passed,
                "done": sorted(self.done),
            }
            part = self.out / "results.json.part"
            part.write_text(json.dumps(report, indent=1))
            part.replace(self.out / "results.json")

    def pack(self):
        """Puts all logs into one archive: few files are sooner copied."""
        part = self.out / "logs.tar.part"
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self.out / "logs", "logs")
        part.replace(self.out / LOGS)


def objects(output):
    """The JSON objects of an output, one a line; other lines are passed over."""
    found = []
    for line in (output or "").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return [value for value in found if isinstance(value, dict)]


def last_object(output):
    return (objects(output) or [{}])[-1]


def commit(folder):
    path = pathlib.Path(folder) / "commit"
    return path.read_text().strip() if path.exists() else None
