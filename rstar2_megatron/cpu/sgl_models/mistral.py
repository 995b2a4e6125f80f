from sglang.srt.models.mistral import MistralForCausalLM

EntryClass = MistralForCausalLM
