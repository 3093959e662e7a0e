"""What is found where a result is compared with its exact value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One result against its exact value.

    Attributes:
        name: out, lse, dq, dk, dv, dalibi_slopes or dsink.
        passed: whether the rule holds.
        max_error, rms_error: of the result; where exact is finite and the dtype can hold it. Less the noise, if
            it is more than the bound with it; of lse, in units of max(1, |exact|).
        plain_max_error, plain_rms_error: of plain attention, at the same places, noise included.
        max_bound, rms_bound: what the errors may be at most.
        index: where the result is worst, None if it is empty. A misplaced NaN or inf is worse than any error.
        got, exact: both values there.
        reason: "" or, in words, why it failed.
    """

    name: str
    passed: bool
    max_error: float
    rms_error: float
    plain_max_error: float
    plain_rms_error: float
    max_bound: float
    rms_bound: float
    index: tuple[int, ...] | None
    got: float
    exact: float
    reason: str = ""

    @property
    def ratio(self) -> float:
        """The larger of our errors (max, rms) divided by those of plain attention; 0 without any error."""
        pairs = ((self.max_error, self.plain_max_error), (self.rms_error, self.plain_rms_error))
        return max(0.0 if ours == 0 else ours / plain if plain else float("inf") for ours, plain in pairs)

    @property
    def share(self) -> float:
        """The larger of error / bound (max, rms): how much of what is allowed was used."""
        pairs = ((self.max_error, self.max_bound), (self.rms_error, self.rms_bound))
        return max(ours / bound for ours, bound in pairs)

    def __str__(self) -> str:
        text = (
            f"{self.name}: max {self.max_error:.2e} (plain {self.plain_max_error:.2e}, bound {self.max_bound:.2e}), "
            f"rms {self.rms_error:.2e} (plain {self.plain_rms_error:.2e}, bound {self.rms_bound:.2e})"
        )
        if self.index is not None:
            text += f", worst at {self.index}: got {self.got:.8g}, exact {self.exact:.8g}"
        return text if self.passed else f"{text}; FAILED: {self.reason}"
