"""chemprop: a message-passing network on a few molecules."""

import lightning.pytorch as pl
import recorder
from chemprop import data, models, nn

smiles = ["CCO", "CCN", "CCC", "c1ccccc1", "CC(=O)O", "CCCl", "CO", "CCCC", "CN", "OCCO", "c1ccncc1", "CCCO"] * 4
points = [data.MoleculeDatapoint.from_smi(smi, [float(len(smi))]) for smi in smiles]
train, val = data.MoleculeDataset(points[:40]), data.MoleculeDataset(points[40:])
recorder.seed()
model = models.MPNN(nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32), batch_norm=False)
trainer = pl.Trainer(
    max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", devices=1
)
trainer.fit(
    model,
    data.build_dataloader(train, batch_size=8, num_workers=0, seed=1),
    data.build_dataloader(val, batch_size=8, shuffle=False, num_workers=0),
)
