"""What the models of the study are taught, a course a task: stages of rounds, and when it is enough."""

from __future__ import annotations

from teaching import Stage

from mezzotint.data.errors import InputError

BLOCK = 8
TRAINED = 160  # tokens of the last rows of a course, which the lengths of the study are multiples of
ASKED = {"passkey": "passkey", "mqar": "mqar:pairs=4:queries=4:symbols=16"}
RATES = {"attention": 3e-3, "attention-nope": 3e-3, "mamba": 3e-3, "hybrid": 3e-3, "hybrid-nope": 3e-3}
TAUGHT = "mqar:pairs=2/3/4:queries=0:symbols=16"  # half of a text are questions: most of it says something about recall
# a value can be told only where its key is visible, so half masked teaches most; prompts of tests are masked like that
HALF_MASKED = ("objective.schedule_low=0.1", "objective.schedule_high=0.6")

COURSES = {
    "passkey": (
        Stage(
            name="passkey",
            taught=(f"passkey:length={TRAINED}",),
            row=TRAINED,
            rows_per_step=8,
            steps=1000,
            rounds=6,
            asked=((ASKED["passkey"], TRAINED),),
            enough=0.95,
            least=3,  # a hybrid kept 0.80 at 16 times its rows after one round, 0.90 after two
        ),
    ),
    "mqar": (
        Stage(
            name="pairs",
            taught=(f"{TAUGHT}:length=64",),
            row=64,
            rows_per_step=20,
            steps=600,
            rounds=6,
            asked=((ASKED["mqar"], 64),),
            enough=0.9,
            tokens="1m",
            settings=HALF_MASKED,
        ),
        Stage(
            name="mqar",
            taught=(f"{TAUGHT}:length={TRAINED}",),
            row=TRAINED,
            rows_per_step=8,
            steps=600,
            rounds=6,
            asked=((ASKED["mqar"], TRAINED),),
            enough=0.97,
            tokens="1m",
            settings=HALF_MASKED,
        ),
    ),
}


def tasks_of(text: str) -> tuple[str, ...]:
    """`passkey,mqar` as names. Raises InputError for another one."""
    tasks = tuple(text.split(","))
    unknown = [task for task in tasks if task not in COURSES]
    if unknown:
        raise InputError(f"no task {unknown[0]!r} in the study; one of {', '.join(COURSES)}")
    return tasks
