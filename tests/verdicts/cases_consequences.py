"""Consequences that look like causes, hooks that print instead of Python, ranks that cannot be asked."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "consequences in disguise"
PLAIN = ENVIRON + MEET
SHORT = (
    TORCH
    + """\
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
group = dist.new_group(timeout=timedelta(seconds=4))
dist.barrier()
"""
)
SERVER = """\
import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"1")
    def log_message(self, *args):
        pass
if rank == 0:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    open("port.new", "w").write(str(server.server_address[1])); os.replace("port.new", "port")
    threading.Thread(target=server.serve_forever, daemon=True).start()
while not os.path.exists("port"):
    time.sleep(0.02)
port = int(open("port").read())
"""
"""Rank 0 serves the others."""

CASES = (
    Case(
        "service-of-rank-0-ends-in-silence",
        GROUP,
        PLAIN
        + SERVER
        + """\
for step in range(200):
    if rank == 0:
        time.sleep(0.05)
        if step == 20:
            os._exit(3)
    else:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
        time.sleep(0.01)
""",
        ranks=(0,),
        says=("exit code 3", "exitcode 3"),
    ),
    Case(
        "service-of-rank-0-raises",
        GROUP,
        PLAIN
        + SERVER
        + """\
for step in range(200):
    if rank == 0:
        time.sleep(0.05)
        if step == 20:
            raise ArithmeticError("parameter 12 is not finite")
    else:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
        time.sleep(0.01)
""",
        ranks=(0,),
        says=("parameter 12 is not finite",),
    ),
    Case(
        "file-barrier-gives-up",
        GROUP,
        PLAIN
        + """\
def wait_for_parts():
    until = time.monotonic() + 3
    while missing := [other for other in range(world) if not os.path.exists(f"part-{other}")]:
        if time.monotonic() > until:
            raise TimeoutError(f"ranks {missing} did not write their parts within 3 s")
        time.sleep(0.05)
if rank == 1:
    time.sleep(90)  # a stalled filesystem
open(f"part-{rank}", "w").close()
wait_for_parts()
""",
        ranks=(1,),
        says=("ranks [1] did not write their parts",),
        unknown_is_right=True,
    ),
    Case(
        "gathered-from-a-bad-rank",
        GROUP,
        GLOO
        + """\
shapes = [None] * world
dist.all_gather_object(shapes, (3 if rank == 2 else 4, 8))
if rank == 0:
    bad = [r for r, shape in enumerate(shapes) if shape != (4, 8)]
    assert not bad, f"ranks {bad} have another shape than (4, 8)"
dist.barrier()
""",
        ranks=(0,),
        says=("ranks [2] have another shape",),
    ),
    Case(
        "own-exception-hook-prints-a-line",
        GROUP,
        PLAIN
        + """\
def hook(kind, error, trace):
    print(f"\\u2716 {kind.__name__} in step 7: {error}", file=sys.stderr, flush=True)
sys.excepthook = hook
if rank == 1:
    raise ValueError("the tokenizer has no pad token")
time.sleep(60)
""",
        ranks=(1,),
        says=("the tokenizer has no pad token",),
    ),
    Case(
        "own-exception-hook-fails",
        GROUP,
        PLAIN
        + """\
def hook(kind, error, trace):
    upload(error)
sys.excepthook = hook
if rank == 3:
    raise ValueError("the tokenizer has no pad token")
time.sleep(60)
""",
        ranks=(3,),
        says=("the tokenizer has no pad token",),
    ),
    Case(
        "mpi-handler-prints-the-signal",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    sys.stderr.write(
        "[n02:04711] *** Process received signal ***\\n[n02:04711] Signal: Segmentation fault (11)\\n"
        "[n02:04711] Signal code: Address not mapped (1)\\n[n02:04711] Failing at address: (nil)\\n"
        "[n02:04711] [ 0] /lib64/libpthread.so.0(+0xf630)[0x7f1c2e423960]\\n"
        "[n02:04711] [ 1] ./solver(mesh_refine+0x1d)[0x40118d]\\n[n02:04711] *** End of error message ***\\n"
    )
    sys.stderr.flush()
    os._exit(139)
time.sleep(60)
""",
        ranks=(2,),
        says=("Segmentation fault",),
    ),
    Case(
        "triton-like-message",
        GROUP,
        PLAIN
        + """\
class CompilationError(Exception):
    pass
if rank == 0:
    raise CompilationError('''at 12:11:
    x = tl.load(ptr + offsets)
    y = x + mask
           ^
IncompatibleTypeErrorImpl('invalid operands of type pointer<fp32> and int1')''')
time.sleep(60)
""",
        ranks=(0,),
        says=("invalid operands of type",),
    ),
    Case(
        "two-children-print-into-each-other",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    trace = '''Traceback (most recent call last):
  File "/home/u/crop.py", line 7, in <module>
    crop(image)
  File "/home/u/crop.py", line 3, in crop
    raise ValueError("crop of 300 from an image of 224")
ValueError: crop of 300 from an image of 224'''
    for line in trace.split("\\n"):
        print(line, line, sep="\\n", file=sys.stderr, flush=True)
    sys.exit(1)
time.sleep(60)
""",
        ranks=(1,),
        says=("crop of 300 from an image of 224",),
    ),
    Case(
        "wrapped-python-is-terminated",
        GROUP,
        PLAIN
        + """\
import signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
""",
        ranks=(1,),
        says=("SIGTERM", "Terminated"),
        command=["--no-python", "./start.sh"],
        files={"start.sh": "#!/bin/bash\npython3 train.py\nexit $?\n"},
    ),
    Case(
        "keeps-the-gil-in-c",
        GROUP,
        SHORT
        + """\
import ctypes
if rank == 2:
    ctypes.PyDLL(None).sleep(90)
dist.barrier(group=group)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "ignores-all-signals-and-computes",
        GROUP,
        SHORT
        + """\
import signal
if rank == 1:
    for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        sum(range(1000))
dist.barrier(group=group)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "nothing-to-do-before-the-group",
        GROUP,
        TORCH
        + """\
if rank == 3:
    print("no shard left for this rank")
    sys.exit(0)
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
dist.barrier()
""",
        ranks=(3,),
        says=("ended with 0",),
        unknown_is_right=True,
    ),
    Case(
        "ring-of-receives",
        GROUP,
        SHORT
        + """\
dist.recv(torch.ones(1), src=(rank - 1) % world, group=group)
dist.send(torch.ones(1), dst=(rank + 1) % world, group=group)
""",
        ranks=(),
        unknown_is_right=True,
    ),
    Case(
        "cause-in-a-file-of-its-own",
        GROUP,
        PLAIN
        + """\
sys.stderr = open(f"err-{rank}.log", "w", buffering=1)
if rank == 2:
    raise ValueError("only in err-2.log")
time.sleep(60)
""",
        ranks=(2,),
        says=("exit code 1", "exitcode 1", "only in err-2.log"),
    ),
    Case(
        "victims-retry-then-give-up",
        GROUP,
        GLOO
        + """\
def sync():
    for attempt in range(3):
        try:
            return dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            print(f"WARNING sync failed ({attempt}): {error}", file=sys.stderr, flush=True)
            time.sleep(0.1)
    raise RuntimeError("gave up after 3 tries")
for step in range(30):
    if rank == 3 and step == 9:
        time.sleep(0.2)
        raise LookupError("no weight for task 'qa'")
    sync()
""",
        ranks=(3,),
        says=("no weight for task 'qa'",),
    ),
    Case(
        "victims-assert-on-the-sum",
        GROUP,
        SHORT
        + """\
ok = torch.ones(1)
try:
    if rank == 2:
        raise OSError(5, "Input/output error", "/data/part-2.bin")
except OSError as error:
    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    ok.zero_()
dist.all_reduce(ok)
assert ok.item() == world, "a rank reported a failure"
""",
        # The assertion is the same everywhere; the reason stands in rank 2's own output.
        ranks=(0, 1, 2, 3),
        says=("a rank reported a failure",),
    ),
)
