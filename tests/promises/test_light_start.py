"""A run that compiles nothing does not load torch's compiler, nor what only that needs: that takes seconds."""

import subprocess
import sys

HEAVY = ("torch._dynamo", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._inductor")
RUN = """
import sys, torch
from torch import nn
import paceline

class Line(paceline.Task):
    def train_data(self):
        return [(torch.randn(4, dtype=torch.float32, device="cpu"),) for _ in range(8)]
    def model(self):
        return nn.Linear(4, 1, dtype=torch.float32, device="cpu")
    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

for optimizer in {optimizers!r}:
    paceline.fit(Line(), out=sys.argv[1] + "/" + optimizer, epochs=2, global_batch=4, optimizer=optimizer, lr=0.01,
                 device="cpu", progress="none", loggers=())
print("heavy", [name for name in {heavy!r} if name in sys.modules])
compiled = torch.compile(lambda x: paceline_op(x), backend="eager")
from paceline.core.torch_private import not_compiled
@not_compiled
def paceline_op(x):
    assert not torch.compiler.is_compiling()
    return x + 1
print("compiled", compiled(torch.ones(2, dtype=torch.float32, device="cpu")).sum().item())
print("again", compiled(torch.ones(2, dtype=torch.float32, device="cpu")).sum().item())
made = torch.compile(lambda: torch.optim.SGD([weight]).param_groups[0]["params"], backend="eager")
weight = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
print("optimizers", made()[0] is weight)
"""


def test_nothing_heavy_is_loaded(tmp_path):
    code = RUN.format(optimizers=("sgd", "adamw", "novograd", "lamb"), heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "heavy []" in done.stdout, done.stdout
    assert "compiled 4.0" in done.stdout
    assert "again 4.0" in done.stdout
    assert "optimizers True" in done.stdout, done.stdout
