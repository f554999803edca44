"""Make error files with torch's own ``@record``, by the interpreter that runs this: ``python make.py FOLDER``.

Each case is a process of its own, as under torchrun. ``passed-on.json`` is what a parent wrote that raised a
ChildFailedError; ``by-torchrun.json`` is what ``torchrun`` itself wrote for who started it.
"""

import json
import os
import subprocess
import sys
import tempfile

CASES = {
    "plain": """
def step(n):
    raise ValueError(f"bad batch {n}")
def body(): step(17)
""",
    "chained": """
def body():
    try:
        {}["shard"]
    except KeyError as error:
        raise RuntimeError("no data\\nin two lines") from error
""",
    "group": "def body(): raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])",
    "unicode": "def body(): raise ValueError('Größe 日本 🙂 \\ud800 \\x1b[31mred\\x1b[0m \\x00end')",
    "no-message": "def body(): raise AssertionError",
    "passed-on": """
import os, signal, subprocess, sys, tempfile
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
def body():
    child = os.path.join(tempfile.mkdtemp(), "child.json")
    code = "from torch.distributed.elastic.multiprocessing.errors import record\\n@record\\ndef main(): 1 / 0\\nmain()\\n"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TORCHELASTIC_ERROR_FILE": child},
                          stderr=subprocess.DEVNULL)
    raise ChildFailedError("train.py", {3: ProcessFailure(3, 4711, -signal.SIGSEGV, child)})
""",
}
TRAINING = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("bad batch 17")
main()
"""
RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    body()
main()
"""


def main(folder):
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, body in CASES.items():
            script = os.path.join(temporary, "train.py")
            with open(script, "w") as file:
                file.write(body + RECORDED)
            run(folder, name, [sys.executable, script])
        with open(script, "w") as file:
            file.write(TRAINING)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        run(folder, "by-torchrun", command)


def run(folder, name, command):
    path = os.path.join(folder, name + ".json")
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": path, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        with open(path) as file:
            text = file.read()
    except FileNotFoundError:
        return  # this version writes none
    # Folders of the machine that it was made on say nothing.
    for prefix, shown in ((sys.prefix, "/opt/venv"), (sys.base_prefix, "/usr"), (tempfile.gettempdir(), "/tmp")):
        text = text.replace(json.dumps(prefix)[1:-1], shown)
    with open(path, "w") as file:
        file.write(text)


main(sys.argv[1])
