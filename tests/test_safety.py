"""R21: nothing that can run code from bytes, anywhere in the tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path
    for folder in ("protocol", "kernels", "node", "coordinator", "simulation", "tui")
    for path in (ROOT / folder).rglob("*.py")
)
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "os.system",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                found.append(node.module or "")
        elif isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                found.append(dotted(node.func))
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and on:
                    found.append(f"{keyword.arg}=True")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_code_from_bytes(path: Path) -> None:
    assert findings(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(p)",
        "eval(x)",
        "np.load(p, allow_pickle=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "subprocess.run(c, shell=True)",
    ],
)
def test_the_search_finds_what_it_must_find(source: str) -> None:
    assert findings(ast.parse(source))
