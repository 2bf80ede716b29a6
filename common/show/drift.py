"""Find functions that have drifted apart from stage to stage.

python -m common.show.drift    # fails if a function differs from the parent's in comments alone
"""

import ast

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


def drift() -> tuple[list[str], list[str]]:
    """Compare each function with the same function of the stage's ancestors, in the same pass. NOTEs do not count.

    Returns:
        The functions that differ from the parent's in comments, docstrings or layout alone, and the functions that equal an
        older ancestor's but not the parent's. In lines such as "v5_tuned: _dq_kernel in backward.py, from v4_…".
    """
    worded, returned, parents = [], [], {name: stages.parent(name) for name in stages.names()}
    for pass_ in results.CODE.values():
        functions = {name: _functions(name, pass_) for name in parents}
        for name, mine in functions.items():
            ancestors, above = [], name
            while above := parents[above]:
                ancestors.append(above)
            for key, text in mine.items():
                theirs = [functions[above].get(place(key, functions[above], mine)) for above in ancestors]
                if not theirs or theirs[0] == text:
                    continue
                where = f"{name}: {key[1]} in {key[0]}"
                if theirs[0] and _statements(theirs[0]) == _statements(text):
                    worded.append(f"{where}, from {ancestors[0]}")
                if text in theirs:
                    returned.append(f"{where}, as in {ancestors[theirs.index(text)]}")
    return worded, returned


def _functions(name: str, pass_: str) -> dict[Key, str]:
    """Return the source of each function of a stage's pass, without NOTEs, by its file and name."""
    found = {file: story.functions(stages.source(name, file)) for file in stages.files(pass_, name)}
    return {(file, function): code(text) for file, of in found.items() for function, text in of.items()}


def main():
    """Run the command line."""
    terminal.prepare()
    worded, returned = drift()
    print("Functions that equal an older ancestor's but not the parent's. Is a mend missing, or is the return meant?")
    print(*(f"  {line}" for line in returned or ["none"]), sep="\n")
    if worded:
        print("Functions that differ from the parent's in comments, docstrings or layout alone. Make them equal:")
        print(*(f"  {line}" for line in worded), sep="\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
