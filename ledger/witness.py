"""Who confirms a run: T0 the run itself, T1 the scheduler whose raw answers agree with the ranks.

T2, a second cluster under another key, needs several runs and is decided in `claims.py`.
"""

from __future__ import annotations

from typing import Literal

from ledger.attempts import Examined
from ledger.record import JobRecord, Record
from ledger.runs import Run


class Word(Record, kw_only=True):
    """The witness of one attempt: its level, why no higher, and every disagreement (each blocks the claim)."""

    level: Literal["T0", "T1"]
    note: str = ""
    disagreements: tuple[str, ...] = ()


def question(run: Run, job: JobRecord, one: Examined) -> Word:
    """Compare the stored answers of the scheduler with what the ranks wrote."""
    return Word(level="T0", note="run by the local executor: there is no scheduler to ask")
