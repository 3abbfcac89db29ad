"""The report of a machine: what failed, where time goes, and what to improve first."""

# Improvements that are named.
NEXT = 5


def report(checks):
    """Markdown, for docs/results/gpu-results.md."""
    facts = checks.facts
    lines = [f"# {facts.get('gpu') or 'no GPU'}", "", f"Commit {facts.get('commit')}.", ""]
    failed = checks.failed()
    ok = sum(result == "ok" for _, result, *_ in checks.rows)
    lines += [f"{ok} ok, {len(failed)} failed.", "", "| check | result | |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for *cells, _ in checks.rows]
    profiles = {name: value for name, value in checks.numbers.items() if name.startswith("profile ")}
    for name, profile in profiles.items():
        lines += ["", *table(name, profile)]
    for name, kernels in checks.numbers.items():
        if name.startswith("ncu "):
            lines += ["", *counted(name, kernels)]
    gains = improvements(profiles)
    if gains:
        lines += ["", "What would gain most, if it reached the ceilings:", ""]
        lines += [f"{at}. {what}" for at, what in enumerate(gains, 1)]
    return "\n".join(lines) + "\n"


def table(name, profile):
    step = 1e3 * profile["s_per_step"]
    ceilings = profile["ceilings"]
    yield (f"{name}: {step:.2f} ms a step, {profile['other_ms']:.2f} outside of kernels. The GPU reaches "
           f"{ceilings['bf16_gflops'] / 1e3:.0f} TFLOP/s in bf16, {ceilings['update_gb_per_s']:.0f} GB/s.")
    yield ""
    yield "| kernel | pass | calls | ms | share | TFLOP/s | GB/s | of ceiling |"
    yield "|---|---|---|---|---|---|---|---|"
    number = lambda value, unit=1.0: "" if value is None else f"{value / unit:.1f}"
    for row in profile["operations"]:
        reached = "" if row["of_ceiling"] is None else f"{row['of_ceiling']:.0%}"
        yield (f"| {row['operation']} | {row['pass']} | {row['calls']:.0f} | {row['ms']:.3f} | {row['ms'] / step:.1%} | "
               f"{number(row['gflops'], 1e3)} | {number(row['gb_per_s'])} | {reached} |")


def counted(name, kernels):
    total = sum(kernel["ms"] for kernel in kernels.values())
    yield f"{name}: {total:.2f} ms in kernels."
    yield ""
    yield "| kernel | launches | ms | share |"
    yield "|---|---|---|---|"
    for kernel, found in sorted(kernels.items(), key=lambda item: -item[1]["ms"]):
        yield f"| {kernel} | {found['launches']} | {found['ms']:.3f} | {found['ms'] / total:.1%} |"


def improvements(profiles):
    """The kernels that lose most against the ceilings, over all models, in milliseconds a step."""
    lost = []
    for name, profile in profiles.items():
        for row in profile["operations"]:
            if row["of_ceiling"] is not None:
                gain = row["ms"] * (1 - min(row["of_ceiling"], 1))
                model = name.removeprefix("profile ")
                lost.append((gain, f"{row['operation']} ({row['pass']}, {model}): {gain:.2f} of {row['ms']:.2f} ms"))
    return [what for _, what in sorted(lost, reverse=True)[:NEXT]]
