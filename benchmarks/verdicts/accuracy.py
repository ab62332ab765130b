"""Accuracy of a measured step: steps of a known length, by sleeping, against their formula."""

import json

from benchmarks.timing import concluded, record, table

CASES = (
    # ranks, alpha in ms, beta in ms, split, bound in percent
    (2, 100.0, 12.5, (8, 8), 2.0),
    (2, 100.0, 12.5, (12, 4), 2.0),
    (2, 200.0, 50.0, (15, 1), 2.0),
    (8, 400.0, 50.0, (2,) * 8, 5.0),
    (8, 400.0, 50.0, (4, 4, 2, 2, 1, 1, 1, 1), 5.0),
)


def main() -> None:
    """Writes the section "Accuracy"."""
    rows = [row(*case) for case in CASES]
    header = ["ranks", "split", "formula ms", "measured ms", "zero sleep ms", "error", "bound"]
    text = (
        "The `sleep` workload under ddp: the longest α + β·b over ranks against the measured step "
        "less that of a zero sleep on as many ranks; 8 rounds.\n\n"
    )
    record("Accuracy", text + table(header, rows))


def row(ranks: int, alpha_ms: float, beta_ms: float, split: tuple[int, ...], bound: float) -> list[str]:
    formula_ms = max(alpha_ms + beta_ms * samples for samples in split)
    measured_ms = step_ms(ranks, alpha_ms, beta_ms, split)
    zero_ms = step_ms(ranks, 0.0, 0.0, split)
    error = 100 * ((measured_ms - zero_ms) / formula_ms - 1)
    name = "/".join(map(str, split))
    figures = [
        f"{formula_ms:.0f}",
        f"{measured_ms:.2f}",
        f"{zero_ms:.2f}",
        f"{error:+.2f} %",
        f"±{bound:g} %",
    ]
    return [str(ranks), name, *figures]


def step_ms(ranks: int, alpha_ms: float, beta_ms: float, split: tuple[int, ...]) -> float:
    job = {
        "name": "accuracy",
        "workload": "sleep",
        "params": {"alpha_ms": alpha_ms, "beta_ms": beta_ms},
        "devices": f"cpu:{ranks}",
        "global_batch": sum(split),
        "split": list(split),
        "steps": {"rounds": 8},
        "profile": {"steps": 0},
        "gradient_check": False,
    }
    comparison, _ = concluded(json.dumps(job))
    return float(comparison["variants"][0]["step_ms"]["estimate"])
