"""What octavo-tiny can say about serving language models: one entry per concept, in sentences that may be combined.

`lead` sentences say what the thing is and can stand alone; `more` sentences follow in any order.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Concept:
    """One concept: the names that questions use, the name that sentences use, and the sentences themselves."""

    names: tuple[str, ...]
    lead: tuple[str, ...]
    more: tuple[str, ...]


CONCEPTS: tuple[Concept, ...] = (
    Concept(
        ("octavo", "Octavo", "the octavo engine"),
        (
            "octavo is an engine that serves large language models.",
            "octavo is a program that runs language models and answers many requests at the same time.",
            "octavo is a serving engine: you give it prompts, and it generates text with a language model.",
        ),
        (
            "It keeps the KV cache in blocks, so that memory is not wasted.",
            "It uses continuous batching to keep the machine busy.",
            "You can use it from Python or through a server that speaks the OpenAI protocol.",
            "It runs on a plain CPU and needs no GPU.",
            "I am its small demonstration model.",
        ),
    ),
    Concept(
        ("a KV cache", "the KV cache", "the key-value cache", "KV cache"),
        (
            "The KV cache stores the keys and values of the tokens that a model has already read.",
            "A KV cache keeps the attention keys and values of earlier tokens in memory.",
        ),
        (
            "Without it, the model would compute them again for every new token.",
            "It grows by one entry per layer with every token.",
            "It makes decoding fast, but it needs a lot of memory.",
            "octavo divides it into blocks of a fixed size.",
        ),
    ),
    Concept(
        ("paged attention", "the paged attention algorithm", "PagedAttention", "paging"),
        (
            "Paged attention stores the KV cache in small blocks that can lie anywhere in memory.",
            "The paged attention algorithm divides the KV cache into blocks, like the pages of an operating system.",
            "Paged attention is a way to compute attention over keys and values that are kept in separate blocks.",
        ),
        (
            "A block table tells where the blocks of each sequence are.",
            "Because blocks are given out one at a time, almost no memory is wasted.",
            "Several sequences can share the same block.",
            "When a shared block must change, it is copied first.",
            "This lets the engine run more requests at the same time.",
        ),
    ),
    Concept(
        ("continuous batching", "batching", "the continuous batching method"),
        (
            "Continuous batching adds new requests to the batch at every step.",
            "With continuous batching, a request can join or leave the batch after every token.",
        ),
        (
            "A request that is finished leaves at once and makes room for another.",
            "No request has to wait until the whole batch is done.",
            "This keeps the processor busy and makes serving faster.",
            "The scheduler decides at each step which requests run.",
        ),
    ),
    Concept(
        ("a token", "tokens", "a token in a language model"),
        (
            "A token is a small piece of text, such as a word or a part of a word.",
            "A token is the unit of text that a language model reads and writes.",
        ),
        (
            "A tokenizer turns text into tokens and tokens back into text.",
            "A model writes its answer one token at a time.",
            "Every token has a number.",
            "Common words are often one token, and rare words are several.",
        ),
    ),
    Concept(
        ("prefill", "the prefill phase", "the prefill step"),
        (
            "Prefill is the phase in which the model reads the whole prompt.",
            "In the prefill phase, the model reads all tokens of the prompt and fills the KV cache.",
        ),
        (
            "It can work on many tokens at once, so it uses the processor well.",
            "After the prefill, the first new token can be chosen.",
            "A long prompt can be read in several pieces.",
            "The decode phase comes after it.",
        ),
    ),
    Concept(
        ("decode", "decoding", "the decode phase", "the decode step"),
        (
            "Decode is the phase in which the model writes new tokens, one after another.",
            "In the decode phase, the model produces one token per step for every sequence.",
        ),
        (
            "Each step reads the KV cache of all earlier tokens.",
            "Its speed depends mostly on how fast memory can be read.",
            "It goes on until the model stops or the limit is reached.",
            "Many sequences are decoded together in one batch.",
        ),
    ),
    Concept(
        ("beam search", "the beam search method"),
        (
            "Beam search keeps several partial answers and extends the best of them at every step.",
            "Beam search is a way to look for the most likely text by following several candidates at once.",
        ),
        (
            "The number of candidates is called the beam width.",
            "In the end, the candidate with the highest score wins.",
            "The candidates can share the blocks of their common beginning.",
        ),
    ),
    Concept(
        ("a language model", "an LLM", "a large language model", "language models"),
        (
            "A language model is a program that predicts the next token of a text.",
            "A large language model is a neural network that has learned to continue text.",
        ),
        (
            "It learns from many examples of text.",
            "By predicting one token after another, it can write whole stories.",
            "It can make mistakes, so it is good to check its answers.",
        ),
    ),
    Concept(
        ("a tokenizer", "the tokenizer", "tokenizers"),
        (
            "A tokenizer turns text into numbers that a model can read.",
            "A tokenizer splits text into tokens and gives each token a number.",
        ),
        (
            "My tokenizer works on bytes, so it can write down any text.",
            "It also turns the numbers back into text.",
            "Common words become one token.",
        ),
    ),
    Concept(
        ("a prompt", "the prompt", "prompts"),
        (
            "A prompt is the text that you give to a language model.",
            "A prompt is the beginning of a text, and the model continues it.",
        ),
        (
            "A clear prompt often leads to a better answer.",
            "The model reads it before it writes the first word.",
            "It can be a question, a task or the start of a story.",
        ),
    ),
    Concept(
        ("attention", "the attention mechanism", "self-attention"),
        (
            "Attention lets a model look back at earlier tokens and decide which of them matter.",
            "Attention is the part of a model that connects each token with the tokens before it.",
        ),
        (
            "It compares a query with the keys of all earlier tokens.",
            "The result is a weighted sum of their values.",
            "Its keys and values are kept in the KV cache.",
        ),
    ),
    Concept(
        ("prefix caching", "the prefix cache", "a prefix cache"),
        (
            "Prefix caching keeps the blocks of a prompt, "
            "so that a later request with the same beginning can use them again.",
            "With prefix caching, the common beginning of two prompts is computed only once.",
        ),
        (
            "It saves time when many prompts begin in the same way.",
            "The blocks are found again by their hash.",
            "It is useful for long system messages.",
        ),
    ),
    Concept(
        ("a scheduler", "the scheduler", "scheduling"),
        (
            "The scheduler decides at every step which requests run and how many tokens they get.",
            "A scheduler is the part of the engine that chooses the next batch.",
        ),
        (
            "Requests wait in a queue until there are enough free blocks.",
            "When memory is short, it can pause the youngest request.",
            "It serves requests in the order in which they came.",
        ),
    ),
    Concept(
        ("temperature", "the temperature", "the temperature parameter"),
        (
            "The temperature controls how much chance there is in the choice of the next token.",
            "Temperature is a number that makes the output of a model more or less random.",
        ),
        (
            "With a temperature of zero, the most likely token is always chosen.",
            "A high temperature gives more surprising text.",
            "A low temperature gives safer text.",
        ),
    ),
    Concept(
        ("sampling", "token sampling"),
        (
            "Sampling means to choose the next token by chance, with the probabilities of the model.",
            "Sampling is the step that picks the next token.",
        ),
        (
            "The temperature makes it more or less random.",
            "Top-k sampling looks only at the best k tokens.",
            "With a seed, the same choice can be made again.",
        ),
    ),
    Concept(
        ("a block table", "the block table", "block tables"),
        (
            "A block table lists the memory blocks of a sequence in their order.",
            "A block table tells the engine where each part of a sequence is stored.",
        ),
        ("It is like the page table of an operating system.", "A new block is added when the last one is full."),
    ),
    Concept(
        ("speculative decoding",),
        ("Speculative decoding lets a small model guess several tokens, and the large model checks them in one step.",),
        (
            "Right guesses save time.",
            "Wrong guesses are thrown away, so the answer stays the same.",
            "It makes decoding faster.",
        ),
    ),
    Concept(
        ("quantization", "a quantized model"),
        (
            "Quantization stores the numbers of a model with fewer bits.",
            "Quantization makes a model smaller by using fewer bits for each weight.",
        ),
        ("A smaller model needs less memory and can run faster.", "The answers may become a little less exact."),
    ),
    Concept(
        ("a GPU", "GPUs"),
        ("A GPU is a processor that does many calculations at the same time.",),
        (
            "Language models run fast on it.",
            "It was first made for drawing pictures.",
            "Its memory is fast, but there is not much of it.",
        ),
    ),
    Concept(
        ("a CPU", "CPUs"),
        ("A CPU is the main processor of a computer.",),
        ("It can run small models like me.", "It is good at many kinds of work.", "It has a few strong cores."),
    ),
    Concept(
        ("throughput",),
        ("Throughput is the number of tokens or requests that a server can process in a second.",),
        ("Large batches make it higher.", "A good scheduler keeps it high.", "Latency is how long one request takes."),
    ),
    Concept(
        ("latency",),
        ("Latency is the time that a user waits for an answer.",),
        (
            "The time to the first token depends on the prefill.",
            "A server tries to keep it low while it serves many users.",
            "It is measured in seconds or milliseconds.",
        ),
    ),
)
