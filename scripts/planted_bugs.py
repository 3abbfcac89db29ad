#!/usr/bin/env python3
"""Plants bugs into a copy of the control plane, one at a time, and counts the seeds until the simulation finds each.

    scripts/planted_bugs.py           plants each, and tries up to 10,000 seeds: 20 minutes
    scripts/planted_bugs.py --check   only checks that each can be planted

A bug that is not found, or cannot be planted since the source has changed, is an error.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "target" / "planted_bugs"
HOST = Path("parallel/src/collective/host")
SEEDS = 10_000

# What is wrong, the file below HOST, what stands there, and what is planted instead.
BUGS = [
    ("a rank tells its parent that all below have met when the first has", "rendezvous/control.rs",
     "wait_for(|complete| complete.len() == children.len())",
     "wait_for(|complete| children.len() == 0 || !complete.is_empty())"),
    ("a rank that has said goodbye is taken for gone", "rendezvous/control/messages.rs",
     "if !lock(&self.departed).contains(&peer) {",
     "{"),
    ("a failure is told to the parent alone", "rendezvous/control.rs",
     "for peer in self.neighbours() {",
     "for peer in tree::parent(self.rank) {"),
    ("of two ranks that connect to each other, both let the other in", "rendezvous/connections.rs",
     "Some(State::Connecting) if self.rank > peer => return Decision::Crossed,",
     "Some(State::Connecting) if false => return Decision::Crossed,"),
    ("a rank of an earlier start of the job is let in", "rendezvous/listen.rs",
     "(incarnation != ours)",
     "false"),
    ("a pause of the own process counts as the silence of others", "rendezvous/control/heartbeat.rs",
     "if now.duration_since(due) > period {",
     "if false {"),
    ("a pause of the process counts while pipes are made", "rendezvous/listen.rs",
     "let made = awake_for(PIPE_TIMEOUT, async {",
     "let made = timeout(PIPE_TIMEOUT, async {"),
    ("a rank does not pass the welcome on", "rendezvous/control.rs",
     "children.for_each(|child| self.post(self.message(child, Body::Welcome)));",
     "drop(children);"),
    ("a rank leaves without a goodbye", "rendezvous/control.rs",
     "neighbours.iter().for_each(|&peer| self.post(self.message(peer, Body::Bye)));",
     ""),
    ("a call whose rank is gone does not wait for the reason", "runtime/diagnosis.rs",
     "sleep(GRACE).await;\n        self.rendezvous.census(None).await",
     "Census::default()"),
    ("an address that rank 0 does not know yet is not asked for again", "rendezvous/welcome.rs",
     "None if self.waiting.len() < MOST_WAITING => drop(self.waiting.insert(rank, stream)),",
     "None if self.waiting.len() < MOST_WAITING => {}"),
    ("a connection that has failed is not tried again", "rendezvous/connections.rs",
     "        if is_this {\n            table.states.remove(&(group, peer));\n        }",
     ""),
]


def planted(bug, source):
    what, file, before, after = bug
    if source.count(before) != 1:
        sys.exit(f"planted_bugs: {file} has no single place for: {what}")
    return source.replace(before, after)


def main():
    if "--check" in sys.argv:
        for bug in BUGS:
            planted(bug, (ROOT / HOST / bug[1]).read_text())
        return print(f"{len(BUGS)} bugs can be planted")
    target = COPY / "target"
    for path in COPY.glob("*"):
        if path != target:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    COPY.mkdir(parents=True, exist_ok=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, files.decode().split("\0")):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, COPY / name)
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target))
    sound = COPY / "sound"
    shutil.copy2(built(environment), sound)
    missed = 0
    for bug in BUGS:
        path = COPY / HOST / bug[1]
        source = path.read_text()
        path.write_text(planted(bug, source))
        output = run(built(environment), f"0..{SEEDS}")
        path.write_text(source)
        found = re.search(r"^seed (\d+): (.*)", output, re.M)
        if found and not run(sound, f"{found[1]}..{int(found[1]) + 1}"):
            print(f"{bug[0]}: seed {found[1]}, {found[2][:120]}", flush=True)
        else:
            missed += 1
            print(f"NOT FOUND: {bug[0]}: {found[0][:300] if found else 'no seed'}", flush=True)
    sys.exit(f"planted_bugs: {missed} of {len(BUGS)} were not found" if missed else 0)


def built(environment):
    """The test binary of the copy as it is."""
    build = ["cargo", "test", "--release", "-p", "ferrotron-parallel", "--lib", "--no-run", "--message-format", "json"]
    done = subprocess.run(build, cwd=COPY, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"planted_bugs: the copy cannot be built\n{done.stderr[-2000:]}")
    made = [json.loads(line) for line in done.stdout.splitlines()]
    return next(it["executable"] for it in made if it.get("executable") and it["target"]["name"] == "ferrotron_parallel")


def run(binary, seeds):
    """What the simulation says of the seeds that break a rule: nothing if none does."""
    words = [binary, "ranks_keep_all_rules", "--nocapture"]
    done = subprocess.run(words, env=dict(os.environ, FERROTRON_SEEDS=seeds), capture_output=True, text=True)
    return done.stderr if done.returncode != 0 else ""


if __name__ == "__main__":
    main()
