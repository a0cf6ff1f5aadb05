"""lightly: DINO's loss with a teacher that follows, VICReg's and Barlow Twins'."""

import copy

import lightning.pytorch as pl
import recorder
import torch
from lightly.loss import BarlowTwinsLoss, DINOLoss, VICRegLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch.utils.data import DataLoader, TensorDataset


class Dino(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.student = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        self.student_head = DINOProjectionHead(16, 16, 8, 12, freeze_last_layer=1)
        self.teacher, self.teacher_head = copy.deepcopy(self.student), DINOProjectionHead(16, 16, 8, 12)
        deactivate_requires_grad(self.teacher)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(output_dim=12, warmup_teacher_temp_epochs=2)

    def training_step(self, batch, _):
        update_momentum(self.student, self.teacher, m=0.9)
        update_momentum(self.student_head, self.teacher_head, m=0.9)
        with torch.no_grad():
            teacher = [self.teacher_head(self.teacher(x)) for x in batch[:2]]
        student = [self.student_head(self.student(x)) for x in batch]
        return self.criterion(teacher, student, epoch=self.current_epoch)

    def on_after_backward(self):
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


x = torch.randn(64, 8)
views = [x + 0.1 * torch.randn(64, 8) for _ in range(3)]
recorder.seed()
recorder.trainer(max_epochs=2).fit(Dino(), DataLoader(TensorDataset(*views), batch_size=16))
for criterion in (VICRegLoss(), BarlowTwinsLoss()):
    recorder.seed()
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    recorder.fit(
        net, lambda net, a, b, criterion=criterion: criterion(net(a), net(b)), views[:2], batch_size=16, data_parallel=False
    )
