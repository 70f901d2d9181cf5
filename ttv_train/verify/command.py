"""`ttv-train verify`: compares, prints, and says by its exit code whether everything is as it should be."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tqdm import tqdm

from ttv_train.config import RunConfig
from ttv_train.verify import encoder
from ttv_train.verify.cases import config_case, family_cases
from ttv_train.verify.comparison import TOLERANCES, Comparison, format_table
from ttv_train.verify.sequence import verify_model


def run(
    config: RunConfig | None,
    *,
    families: Sequence[str],
    schemes: Sequence[str],
    degrees: Sequence[int],
    dtype: str,
    fault: str | None,
    as_json: bool,
) -> int:
    """Verifies the model of a run, or tiny models of whole families, and prints what was found.

    Args:
        config: the run; `None` for `families`.
        dtype: `float64` or `float32`, which decides the tolerance.
        fault: one of `ttv_train.verify.FAULTS`.

    Returns:
        0, or 1 if any comparison failed.

    Raises:
        UserError: the run's model or device is not usable.
    """
    cases = [config_case(config)] if config else [case for family in families for case in family_cases(family)]
    device_backend = config.device.backend if config else "cpu"
    comparisons: list[Comparison] = []
    with tqdm(total=len(cases) * len(degrees), desc="verify", unit="model", disable=None) as progress:
        for case in cases:
            for degree in degrees:
                progress.set_postfix_str(f"{case.name} on {degree}")
                comparisons += verify_model(
                    case, schemes, degree, dtype=dtype, device_backend=device_backend, fault=fault
                )
                progress.update()
    failed = sum(comparison.status == "failed" for comparison in comparisons)
    if as_json:
        print(json.dumps(summary(comparisons, dtype, fault), indent=1))
    else:
        print(format_table(comparisons))
        passed = sum(comparison.status == "passed" for comparison in comparisons)
        print(f"{passed} of {passed + failed} comparisons within {TOLERANCES[dtype]:g} ({dtype})", flush=True)
    if fault and not failed:
        print(f"ttv-train verify: the fault {fault} was not caught", file=sys.stderr)
    return 1 if failed else 0


def run_encoders(degrees: Sequence[int], *, as_json: bool) -> int:
    """Verifies the shared encoding of a clip for every video VAE; returns 0, or 1 if an exact mode is not."""
    rows = encoder.verify_encoders(degrees)
    print(json.dumps(encoder.as_json(rows), indent=1) if as_json else encoder.format_table(rows), flush=True)
    return 0 if encoder.passed(rows) else 1


def summary(comparisons: Sequence[Comparison], dtype: str, fault: str | None) -> dict[str, object]:
    """The JSON of `--json`."""
    made = [comparison for comparison in comparisons if comparison.status != "impossible"]
    return {
        "dtype": dtype,
        "tolerance": TOLERANCES[dtype],
        "inject": fault,
        "passed": all(comparison.status == "passed" for comparison in made),
        "worst_loss_difference": max((comparison.loss_difference for comparison in made), default=None),
        "worst_gradient_difference": max((comparison.gradient_difference for comparison in made), default=None),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
