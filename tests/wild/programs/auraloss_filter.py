"""auraloss: a filter trained by spectra of several resolutions."""

import auraloss
import recorder
import torch

recorder.seed()
criterion = auraloss.freq.MultiResolutionSTFTLoss(fft_sizes=[64, 32], hop_sizes=[16, 8], win_lengths=[64, 32])
x = torch.randn(32, 1, 256)
net = torch.nn.Sequential(torch.nn.Conv1d(1, 4, 9, padding=4), torch.nn.Tanh(), torch.nn.Conv1d(4, 1, 9, padding=4))
recorder.fit(net, lambda net, x, y: criterion(net(x), y), [x, x.roll(1, -1) * 0.5], batch_size=8)
