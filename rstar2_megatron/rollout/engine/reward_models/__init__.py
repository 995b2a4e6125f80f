"""SGLang's classifiers as transformers has them: without a bias. A reward engine imports only these.

SGLang's own classes for Qwen add a bias, which no exported model has and which would keep its random initial value. Experts
are not served: SGLang has no such class.
"""
