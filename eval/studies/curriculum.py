"""What the models of the study are taught, and when it is enough: one number in a text first, pairs beside it then."""

from __future__ import annotations

from teaching import Stage

BLOCK = 8
TRAINED = 160  # tokens of every row, which the lengths of the study are multiples of
ASKED = {"passkey": "passkey", "mqar": "mqar:pairs=4:queries=4:symbols=16"}
RATES = {"attention": 3e-3, "attention-nope": 3e-3, "mamba": 3e-3, "hybrid": 3e-3, "hybrid-nope": 3e-3}

STAGES = (
    Stage(
        name="passkey",
        taught=("passkey:length=160",),
        row=160,
        rows_per_step=8,
        steps=1000,
        rounds=6,
        asked=((ASKED["passkey"], TRAINED),),
        enough=0.85,  # to go on; what counts as learned is said where it is asked
    ),
    Stage(
        name="both",
        taught=("mqar:pairs=2/3/4:queries=0:symbols=16:length=32/80/160", "passkey:length=160"),
        row=160,
        rows_per_step=8,
        steps=1000,
        rounds=6,
        asked=((ASKED["passkey"], TRAINED), (ASKED["mqar"], TRAINED)),
        enough=0.97,
        tokens="8m",
    ),
)
