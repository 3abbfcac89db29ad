"""The checks, those first that tell most."""
import csv
import json
import os
import platform
import re
import shutil
import subprocess

from .runner import OutOfBudget, last_object, objects

# NVIDIA's data sheets: dense bf16 TFLOP/s, the denominator of llm.c's MFU, by a part of the GPU's name. Those of the H100
# and H200 SXM unless another is known.
PEAK_TFLOPS = {"A100": 312, "H100 PCIe": 756, "H100 NVL": 835, "B200": 2250}
SXM_TFLOPS = 989
# Libraries without which nothing runs.
NEEDED = ("libcuda", "libnvrtc", "libcublasLt")
# With this, several ranks of NCCL may share a GPU, from this version on.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
SHARED_GPU_SINCE = (2, 30)

# Layers, width, heads, sequence length, micro-batch size, share of the peak that is wanted.
MODELS = {
    "124M": (12, 768, 12, 1024, 32, 0.45),
    "1558M": (48, 1600, 25, 1024, 16, 0.52),
    "1.7B": (24, 2304, 24, 2048, 8, 0.60),
}
TINY = {name: (1, 32, 2, 16, 1, 0.0) for name in MODELS}
# GPT-2's 50,257, padded.
VOCABULARY = 50_304
# What ncu measures of a kernel: nanoseconds, in one pass.
DURATION = "gpu__time_duration.sum"
# Our tokens per second over those of compiled PyTorch, at least.
LEAST_RATIO = 1.15
# Tests of an H200's 16 cores at once, each with its own kernels to compile.
AT_ONCE = 8


class Stages:
    """The stages of a machine, of which `dry` has no GPU but stand-ins for its libraries."""

    def __init__(self, checks, here, python, dry):
        self.checks, self.here, self.python, self.dry = checks, here, python, dry
        # The tests take the machine's GPU in place of the stand-in.
        self.real = {} if dry else {"FERROTRON_TEST_GPU": "0"}
        self.models = TINY if dry else MODELS

    def machine(self):
        """Whether the programs here can start on this machine; says also whether there is a C compiler."""
        versions = re.findall(rb"GLIBC_2\.(\d+)", (self.here / "ferrotron").read_bytes())
        needed, (library, version) = max(map(int, versions)), platform.libc_ver()
        starts = library == "glibc" and tuple(map(int, version.split("."))) >= (2, needed)
        detail = f"{library or 'another library'} {version} is here, glibc 2.{needed} or later is needed"
        self.checks.row("glibc", "ok" if starts else "FAILED (missing)", detail)
        # As Triton looks for it.
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        compiler = next(filter(None, map(shutil.which, names)), None)
        without = "torch.compile needs one, without it PyTorch runs eager: apt install gcc"
        self.checks.row("C compiler", "ok" if compiler else "not there", compiler or without)
        return starts

    def a(self):
        """Whether it works at all, and where the time of a step goes."""
        checks = self.checks
        checks.once("doctor", self.doctor)
        if not self.usable():
            checks.done.discard("doctor")  # --resume looks again
            return
        # Kernels that these have compiled are found by the tests, each of which must end in a minute.
        checks.once("runs", self.runs)
        checks.once("step 124M", lambda: self.step("124M"))
        checks.once("profile 124M", lambda: self.profile("124M"))
        for name in self.tests():
            limit, at_once = 2 if name == "hangs" else 60, 2 if self.dry else AT_ONCE
            checks.once(name, lambda: checks.tests(name, self.here / name, limit, self.real, at_once, self.few(name)))
        checks.once("nccl", self.nccl)
        if tool := self.tool("ncu"):
            checks.once("ncu 124M", lambda: self.ncu(tool, "124M"))

    def b(self):
        """Kernels and products beside what the GPU can do, and the larger models."""
        if not self.usable():
            return
        for group in ("copies", "products", "attentions", "norms", "optimizer"):
            self.checks.once(f"kernels: {group}", lambda: self.kernels(group))
        for name in self.models:
            self.checks.once(f"algorithms {name}", lambda: self.algorithms(name))
        for name in ("1.7B", "1558M"):
            self.checks.once(f"step {name}", lambda: self.step(name))
            self.checks.once(f"profile {name}", lambda: self.profile(name))

    def c(self):
        """PyTorch."""
        command = [self.python, "-c", "import torch"]
        if not self.checks.run("import torch", command, 120, quiet=True, failed="not there")[1]:
            return
        self.checks.once("SDPA", self.attention)
        for name in self.models:
            self.checks.once(f"PyTorch {name}", lambda: self.peer(name))

    def d(self):
        """Accesses that are out of bounds, and races: slow, so of a few kernels."""
        tool = self.tool("compute-sanitizer")
        if not tool:
            return
        for kind in ("memcheck", "racecheck"):
            for tests in ("attention::", "norm::", "softmax::", "indices::"):
                name = f"{kind} {tests[:-2]}"
                command = [tool, "--tool", kind, "--error-exitcode", "9", self.here / "ops", tests]
                self.checks.once(name, lambda: self.checks.run(name, command, 120, self.real))

    def tool(self, name):
        """The path of a program of NVIDIA's toolkit; a row says if it is not there."""
        found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
        if not found:
            self.checks.row(name, "not there", "comes with NVIDIA's toolkit")
        return found

    def doctor(self):
        """What is there; what is missing, with the way to get it."""
        self.checks.run("doctor", [self.here / "ferrotron", "doctor"], 60)
        command = [self.here / "ferrotron", "doctor", "--json"]
        found = last_object(self.checks.run("doctor json", command, 60, quiet=True)[0])
        self.checks.number("doctor", found)
        libraries = found.get("libraries", {})
        missing = [f"{name}: {libraries.get(name, {}).get('missing', 'not told')}" for name in NEEDED
                   if "version" not in libraries.get(name, {})]
        if not isinstance(found.get("devices"), list) or not found["devices"]:
            missing.append(f"GPU: {(found.get('devices') or {'missing': 'none'})['missing']}")
        for what in missing:
            self.checks.row("machine", "FAILED (missing)", what)

    def usable(self):
        return not any(name == "machine" for name in self.checks.failed())

    def peak(self):
        gpu = self.checks.facts.get("gpu") or ""
        return next((peak for part, peak in PEAK_TFLOPS.items() if part in gpu), SXM_TFLOPS)

    def tests(self):
        """The binaries with tests, and in a dry run those that go wrong."""
        names = ["ops", "gradients", "optimizers", "training", "graph", "products"]
        return names + ["hangs", "crashes", "garbage"] if self.dry else names

    def few(self, name):
        """A few quick tests of each binary, where a stand-in does the work."""
        if not self.dry or name in ("hangs", "crashes", "garbage"):
            return None
        listed = subprocess.run([self.here / name, "--list"], capture_output=True, text=True).stdout
        quick = self.here / "quick"
        known = set(quick.read_text().split()) if quick.exists() else None
        tests = [line[: -len(": test")] for line in listed.splitlines() if line.endswith(": test")]
        return [test for test in tests if known is None or test in known] or tests[:1]

    def nccl(self):
        found = last_object(self.checks.run("doctor json", [self.here / "ferrotron", "doctor", "--json"], 60, quiet=True)[0])
        version = found.get("libraries", {}).get("libnccl", {}).get("version")
        if version is None:
            return self.checks.row("nccl", "not there", "pip install nvidia-nccl-cu13")
        self.checks.tests("nccl", self.here / "nccl", 60, self.real, 1)
        if tuple(map(int, re.findall(r"\d+", version)))[:2] < SHARED_GPU_SINCE:
            return self.checks.row("nccl 2 ranks", "not there", f"NCCL {version} puts no two ranks on a GPU")
        two = {**self.real, **SHARED_GPU, "FERROTRON_TEST_NCCL_RANKS": "2"}
        return self.checks.tests("nccl 2 ranks", self.here / "nccl", 60, two, 1)

    def runs(self):
        """Short runs: the CPU's losses in f32, a graph's losses to the bit, bf16 twice to the bit."""
        layers, length = ("1", "16") if self.dry else ("2", "64")
        tiny = ["--num-layers", layers, "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", length]
        steps = 5 if self.dry else 20
        words = ["--train-iters", str(steps), "--seed", "1", "--log-interval", "7", *tiny]
        losses = {}
        for kind, more in (("cpu", []), ("cuda", []), ("graph", ["--enable-cuda-graph"]), ("bf16", ["--bf16"]),
                           ("bf16 again", ["--bf16"]), ("bf16 graph", ["--bf16", "--enable-cuda-graph"])):
            folder = self.checks.out / "runs" / kind.replace(" ", "-")
            shutil.rmtree(folder, ignore_errors=True)
            device = "cpu" if kind == "cpu" else "cuda"
            train = [self.here / "ferrotron", "train", "--device", device, "--save", folder, *words, *more]
            _, well = self.checks.run(f"train {kind}", train, 120, quiet=True)
            metrics = folder / "metrics.jsonl"
            lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else []
            losses[kind] = [line["loss"] for line in lines if "loss" in line]
            if not well and kind != "cpu":
                self.checks.again(f"train {kind}", train, 120)
        shutil.rmtree(self.checks.out / "runs", ignore_errors=True)
        whole = {kind for kind, found in losses.items() if len(found) == steps}
        pairs = list(zip(losses["cpu"], losses["cuda"]))
        largest = max((abs(a - b) / abs(a) for a, b in pairs), default=None)
        close = {"cpu", "cuda"} <= whole and largest < 1e-4
        self.checks.row("train cpu = cuda", "ok" if close else "FAILED", f"largest difference {largest}")
        for one, other in (("cuda", "graph"), ("bf16", "bf16 again"), ("bf16", "bf16 graph")):
            same = one in whole and losses[one] == losses[other]
            self.checks.row(f"train {one} = {other}", "ok" if same else "FAILED", "the same bits of every loss")

    def words(self, name):
        layers, width, heads, length, batch, _ = self.models[name]
        words = ["--num-layers", layers, "--hidden-size", width, "--num-attention-heads", heads, "--seq-length", length,
                 "--micro-batch-size", batch]
        return [str(word) for word in words + (["--vocab-size", 128] if self.dry else [])]

    def bench(self, name, warmup, steps, *options):
        return [self.here / "ferrotron", "bench", "--device", "cuda", "--bf16", *options, *self.words(name),
                "--warmup", warmup, "--steps", steps]

    def ours(self, name, command):
        """What a bench of ours tells last; one that fails runs once more, so that the kernel is named."""
        output, well = self.checks.run(name, command, 150, quiet=True)
        if not well:
            self.checks.again(name, command, 150)
        return last_object(output)

    def step(self, name):
        """A step, eagerly, as a graph, and as a graph with timed algorithms."""
        layers, width, _, length, _, wanted = self.models[name]
        warmup, steps = (1, 2) if self.dry else (5, 20)
        measured = {}
        graph = ["--enable-cuda-graph"]
        for how, options in (("eager", []), ("graph", graph), ("autotuned", [*graph, "--autotune-gemm"])):
            ours = self.ours(f"step {name} {how}", self.bench(name, warmup, steps, *options))
            if "tokens_per_s" not in ours:
                continue
            # llm.c's count: 6 for each parameter and token, 6 x layers x width x positions for causal attention.
            tflops = (6 * ours["params"] + 6 * layers * width * length) * ours["tokens_per_s"] / 1e12
            measured[how] = {**ours, "model_tflops": tflops, "mfu": tflops / self.peak()}
            self.checks.number(f"step {name} {how}", measured[how])
            detail = f"{ours['tokens_per_s']:.0f} tokens/s, {ours['launches_per_step']:.0f} launches, wanted {wanted:.0%}"
            self.checks.row(f"MFU {name} {how}", f"{tflops / self.peak():.1%}", f"of {self.peak()} TFLOP/s, {detail}")
            growth = ours["pool_growth"]
            self.checks.row(f"pool {name} {how}", "ok" if growth == 0 else "FAILED", f"grew by {growth} bytes once it was warm")

    def profile(self, name):
        """A step by kernel, from the moments that the GPU notes between launches."""
        command = self.bench(name, 1, 1 if self.dry else 5, "--profile", "--json")
        profile = self.ours(f"profile {name}", command).get("profile")
        if not profile:
            return
        self.checks.number(f"profile {name}", profile)
        self.checks.row(f"profile {name}", "ok", f"{1e3 * profile['s_per_step']:.1f} ms a step")

    def ncu(self, tool, name):
        """The kernels of two steps and of what precedes them, without the gaps and the recording that a profile counts. Not
        every machine lets ncu read the GPU's counters."""
        how = ["--clock-control", "none", "--metrics", DURATION, "--csv", "--print-units", "base"]
        command = [tool, *how, *self.bench(name, 1, 1)]
        output, well = self.checks.run(f"ncu {name}", command, 150, quiet=True, failed="not there")
        lines = output.splitlines()
        table = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
        kernels = {}
        for row in csv.DictReader(lines[table:]):
            if row.get("Metric Name") == DURATION:
                kernel = kernels.setdefault(row["Kernel Name"], {"launches": 0, "ms": 0.0})
                kernel["launches"] += 1
                kernel["ms"] += float(row["Metric Value"].replace(",", "")) / 1e6
        if kernels:
            self.checks.number(f"ncu {name}", kernels)
            launches, ms = (sum(kernel[part] for kernel in kernels.values()) for part in ("launches", "ms"))
            self.checks.row(f"ncu {name}", f"{ms:.1f} ms", f"{launches} launches, of two steps and what precedes them")
        elif well:
            self.checks.row(f"ncu {name}", "not there", "it has measured nothing")

    def kernels(self, group):
        """Kernels of a kind, in a process of their own: one that fails costs no other kind."""
        # The real ones have the sizes of real models.
        self.measure(f"kernels: {group}", [self.here / ("crashing-kernels" if self.dry else "kernels"), group])

    def measure(self, name, command, prefix="", detail=lambda number: number["unit"]):
        """Takes the numbers that a command prints, a JSON object each; those before its end, if the budget ends it."""

        def take(output):
            found = objects(output)
            for number in found:
                self.checks.number(prefix + number["name"], number)
                self.checks.row(prefix + number["name"], f"{number['value']:.1f}", detail(number))
            return found

        try:
            output, well = self.checks.run(name, command, 120)
        except OutOfBudget as ended:
            take(ended.output)
            raise
        if not take(output):
            self.checks.row(name, "FAILED (no numbers)", "it has measured nothing")
        if not well:
            self.checks.again(name, command, 120)

    def algorithms(self, name):
        """Every algorithm that cuBLASLt offers for the products of a step: the first, which is used, and the best."""
        _, width, _, length, batch, _ = self.models[name]
        words = [name, width, batch * length, 128 if self.dry else VOCABULARY]
        command = [self.here / "kernels", "algorithms", *words]

        def detail(number):
            fused = "" if number["fused"] else ", its epilogue refused"
            return f"TFLOP/s, best of {len(number['algorithms'])} {number['best']:.1f}{fused}"

        self.measure(f"algorithms {name}", command, detail=detail)

    def attention(self):
        device = "cpu" if self.dry else "cuda"
        self.measure("SDPA", [self.python, self.here / "torch_attention.py", "--device", device], "SDPA ")

    def peer(self, name):
        """PyTorch's step, with its blocks compiled as one where its compiler works."""
        how = ["--device", "cpu"] if self.dry else ["--device", "cuda", "--bf16"]
        steps = ["--warmup", "1", "--steps", "2"] if self.dry else ["--warmup", "5", "--steps", "20"]
        command = [self.python, self.here / "torch_gpt.py", "--compile-blocks", *how, *self.words(name), *steps]
        peer = last_object(self.checks.run(f"PyTorch {name}", command, 240)[0])
        if "tokens_per_s" not in peer:
            return
        self.checks.number(f"PyTorch {name}", peer)
        *ours, tuned = [self.checks.numbers.get(f"step {name} {how}", {}).get("tokens_per_s", 0)
                        for how in ("eager", "graph", "autotuned")]
        detail = f"PyTorch {peer['tokens_per_s']:.0f} tokens/s, {peer['mode']}, wanted {LEAST_RATIO}"
        detail += f", {tuned / peer['tokens_per_s']:.2f} autotuned" if tuned else ""
        ratio = f"{max(ours) / peer['tokens_per_s']:.2f}" if max(ours) else "no step of ours"
        self.checks.row(f"ratio {name}", ratio, detail)
