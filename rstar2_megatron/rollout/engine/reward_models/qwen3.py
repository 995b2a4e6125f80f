from typing import Any

import torch
from sglang.srt.models import qwen3_classification


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)


EntryClass = Qwen3ForSequenceClassification
