"""The table of learning rates by rule."""

from dataclasses import dataclass

from noisescale.advice import PlannedChange, Recommendation


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule's learning rate at another batch.

    Attributes:
        key: Of noisescale.rules.RULES.
        factor: On the learning rate of now.
        chosen: Whether it is the one that is advised.
    """

    key: str
    learning_rate: float
    factor: float
    chosen: bool


def rule_rows(change: Recommendation | PlannedChange | None) -> list[RuleRow]:
    """A row a rule; none where there is no change, or no learning rate to change."""
    if change is None or not change.rules or not change.learning_rate_now:
        return []
    return [
        RuleRow(
            key=key,
            learning_rate=rate,
            factor=rate / change.learning_rate_now,
            chosen=key == change.chosen_rule,
        )
        for key, rate in change.rules.items()
    ]
