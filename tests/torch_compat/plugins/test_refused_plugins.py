"""Plugins that an XLA mesh cannot have are refused by name, with the reason."""

from __future__ import annotations

import pytest

from torch_compat.utilities.exceptions import MisconfigurationException


def test_bitsandbytes_is_refused_by_name() -> None:
    from torch_compat.plugins import BitsandbytesPrecision

    with pytest.raises(MisconfigurationException, match=r"BitsandbytesPrecision is not offered on an XLA mesh: .*bf16-true"):
        BitsandbytesPrecision("nf4")
