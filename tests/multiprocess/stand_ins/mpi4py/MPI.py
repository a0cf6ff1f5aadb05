"""``COMM_WORLD`` of as many processes as ``STAND_IN_SIZE`` says, which meet in the folder ``STAND_IN_FOLDER``."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Communicator:
    def __init__(self) -> None:
        self._calls = 0

    def Get_size(self) -> int:
        return int(os.environ["STAND_IN_SIZE"])

    def Get_rank(self) -> int:
        return int(os.environ["STAND_IN_RANK"])

    def allgather(self, value: Any) -> list[Any]:
        self._calls += 1
        paths = [Path(os.environ["STAND_IN_FOLDER"], f"{self._calls}-{rank}.json") for rank in range(self.Get_size())]
        mine = paths[self.Get_rank()]
        mine.with_suffix(".tmp").write_text(json.dumps(value))
        mine.with_suffix(".tmp").rename(mine)
        for _ in range(1200):
            if all(path.exists() for path in paths):
                return [json.loads(path.read_text()) for path in paths]
            time.sleep(0.05)
        raise TimeoutError(f"call {self._calls}: not every rank came")

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]


COMM_WORLD = Communicator()
