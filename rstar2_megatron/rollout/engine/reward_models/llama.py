from sglang.srt.models import llama_reward


class LlamaForSequenceClassification(llama_reward.LlamaForSequenceClassification):
    pass


class MistralForSequenceClassification(llama_reward.LlamaForSequenceClassification):
    """Mistral without a sliding window has Llama's layers."""


EntryClass = [LlamaForSequenceClassification, MistralForSequenceClassification]
