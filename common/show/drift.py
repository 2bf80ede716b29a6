"""Find functions that have drifted apart from stage to stage.

python -m common.show.drift    # fails if a function differs from the parent's in comments alone
"""

import ast
import itertools

import stages
from common.measure import terminal
from common.show import results, story
from common.show.merge import Key, code, place


def _statements(text: str) -> str:
    """Return a function's syntax tree without docstrings, as text."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def drift() -> list[str]:
    """Return the functions that differ from the parent's in comments, docstrings or layout alone. NOTEs do not count.

    A function is compared with the parent's function in the same pass: "v5_tuned: _dq_kernel in backward.py, from v4_…".
    """
    found = []
    for name, pass_ in itertools.product(filter(stages.parent, stages.names()), results.CODE.values()):
        parent = stages.parent(name)
        mine, theirs = _functions(name, pass_), _functions(parent, pass_)
        for key, text in mine.items():
            old = theirs.get(place(key, theirs, mine))
            if old and old != text and _statements(old) == _statements(text):
                found.append(f"{name}: {key[1]} in {key[0]}, from {parent}")
    return found


def _functions(name: str, pass_: str) -> dict[Key, str]:
    """Return the source of each function of a stage's pass, without NOTEs, by its file and name."""
    found = {file: story.functions(stages.source(name, file)) for file in stages.files(pass_, name)}
    return {(file, function): code(text) for file, of in found.items() for function, text in of.items()}


def main():
    """Run the command line."""
    terminal.prepare()
    if found := drift():
        print("Functions that differ from the parent's in comments, docstrings or layout alone. Make them equal:")
        print(*(f"  {line}" for line in found), sep="\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
