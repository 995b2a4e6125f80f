from typing import Any

import torch
from sglang.srt.models import llama_reward, qwen2_classification, qwen3_classification


class LlamaForSequenceClassification(llama_reward.LlamaForSequenceClassification):
    pass


class MistralForSequenceClassification(llama_reward.LlamaForSequenceClassification):
    """Mistral without a sliding window has Llama's layers."""


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)


EntryClass = [
    LlamaForSequenceClassification,
    MistralForSequenceClassification,
    Qwen2ForSequenceClassification,
    Qwen3ForSequenceClassification,
]
