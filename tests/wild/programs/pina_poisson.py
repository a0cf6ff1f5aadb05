"""pina: a physics-informed network for Poisson's equation."""

import recorder
import torch
from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation, FixedValue
from pina.model import FeedForward
from pina.operator import laplacian
from pina.problem import SpatialProblem
from pina.solver import PINN


def poisson(inputs, outputs):
    force = torch.sin(inputs.extract(["x"]) * torch.pi) * torch.sin(inputs.extract(["y"]) * torch.pi)
    return laplacian(outputs, inputs, components=["u"], d=["x", "y"]) - force


class Poisson(SpatialProblem):
    output_variables = ["u"]  # noqa: RUF012
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains = {"edge": CartesianDomain({"x": [0, 1], "y": 0}), "inside": CartesianDomain({"x": [0, 1], "y": [0, 1]})}  # noqa: RUF012
    conditions = {  # noqa: RUF012
        "edge": Condition(domain="edge", equation=FixedValue(0.0)),
        "inside": Condition(domain="inside", equation=Equation(poisson)),
    }


recorder.seed()
problem = Poisson()
problem.discretise_domain(20, "grid", domains=["inside"])
problem.discretise_domain(20, "grid", domains=["edge"])
solver = PINN(problem=problem, model=FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16]))
Trainer(solver, max_epochs=10, accelerator="cpu", enable_model_summary=False, logger=False, batch_size=None).train()
