"""A course: the learner writes the backward passes of a GPT, one by one, and the checker says what is wrong.

    onfoot learn                 makes a folder of exercises
    onfoot learn check 1         judges the first one

Each exercise is a Python file with the forward pass given and the backward pass to write (`course/`). `course.py` lists
them, `adapters.py` says how a learner's function is called, `judge.py` judges it, `answer.py` says what was found.
"""

from onfoot.learn.course import EXERCISES, Exercise, Part, get_exercise
from onfoot.learn.folder import make_folder, write_solutions
from onfoot.learn.judge import judge
from onfoot.learn.notebook_import import import_notebooks
from onfoot.learn.solved import assert_solved
from onfoot.learn.verdict import Verdict

__all__ = [
    "EXERCISES",
    "Exercise",
    "Part",
    "Verdict",
    "assert_solved",
    "get_exercise",
    "import_notebooks",
    "judge",
    "make_folder",
    "write_solutions",
]
