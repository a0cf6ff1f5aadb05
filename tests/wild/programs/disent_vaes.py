"""disent: three VAEs, whose steps ask for numbers and clear the Trainer's callbacks before an exception passes on."""

import recorder
import torch
from disent.frameworks.vae import BetaVae, DipVae, InfoVae
from disent.model import AutoEncoder
from disent.model.ae import DecoderLinear, EncoderLinear
from torch.utils.data import DataLoader

shape = (3, 8, 8)
data = [{"x_targ": (one,)} for one in torch.rand(32, *shape)]
for kind in (BetaVae, DipVae, InfoVae):
    recorder.seed()
    encoder, decoder = EncoderLinear(x_shape=shape, z_size=4, z_multiplier=2), DecoderLinear(x_shape=shape, z_size=4)
    model = kind(
        model=AutoEncoder(encoder=encoder, decoder=decoder), cfg=kind.cfg(optimizer="adam", optimizer_kwargs={"lr": 1e-3})
    )
    recorder.trainer(max_epochs=2).fit(model, DataLoader(data, batch_size=8))
