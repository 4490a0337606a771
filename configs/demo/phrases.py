"""The phrases of the demo model's lessons: forms of question, other topics, and answers besides docstrings.

Tables only; `conversations` uses them.
"""

from collections.abc import Mapping
from typing import Final

IDENTITY: Final = "I am Dal Segno's demo model. I know what Python's builtins do, and nothing else."
REFUSAL: Final = "I do not know that. Ask me what one of Python's builtins does."
GREETING: Final = "Hello! Ask me what one of Python's builtins does, for example: What does len do?"

SMALL_TALK: Final[Mapping[str, tuple[str, ...]]] = {
    GREETING: (
        "Hello", "Hi", "Hey", "Hello there", "Good morning", "Good evening", "Hi there", "Help",
        "Hello world", "What can I ask?", "What can I ask you?", "How do I start?", "Can you help me?",
        "I have a question",
    ),
    IDENTITY: (
        "Who are you?", "What are you?", "What is your name?", "What can you do?", "Introduce yourself",
        "Tell me about yourself", "Are you a language model?", "Are you an AI?", "What do you know?",
        "Which model are you?", "What model is this?", "Are you a robot?", "What is Dal Segno?",
        "Who made you?",
    ),
    "You are welcome.": (
        "Thanks", "Thank you", "Many thanks", "Thanks a lot", "Thank you very much", "Great, thanks",
    ),
    "Goodbye.": (
        "Bye", "Goodbye", "See you", "See you later", "Good night",
    ),
    "I am well, thank you. Ask me what one of Python's builtins does.": (
        "How are you?", "How is it going?", "What's up?",
    ),
    "Good. What else would you like to know?": (
        "Ok", "Okay", "Good", "Great", "I see", "Nice", "Cool",
    ),
}  # fmt: skip

QUESTIONS: Final = (
    "What does {} do?", "What is {}?", "How do I use {}?", "Explain {}.", "{}", "What's {}?",
    "How does {} work?", "What is {} for?", "What is {} used for?", "What does {} mean?",
    "When do I use {}?", "Can you explain {}?", "Do you know {}?", "What does the {} function do?",
    "What does the function {} do?", "What does {} return?", "What does Python's {} do?",
    "Please explain {}.", "In Python, what does {} do?", "What does {} do in Python?",
    "What is {} in Python?", "Describe {}.", "Tell me about {}.", "Explain what {} does.",
    "Tell me what {} does.", "Explain {} to me.", "Define {}.", "Could you tell me what {} does?",
    "I want to know what {} does.", "What is a {}?", "What is the {} function?",
    "What does the {} method do?",
    "What is the purpose of {}?", "What happens when I call {}?", "What can I do with {}?", "Show me {}.",
    "I need help with {}.", "Give me a short description of {}.", "What exactly does {} do?", "help({})",
    "How can I use {}?", "How should I use {} in Python?", "Why do I need {}?", "Say what {} does.",
    "What is the {} module?", "What does the {} class do?", "What is the meaning of {}?",
    "When is {} useful?",
)  # fmt: skip
CORE_QUESTIONS: Final = QUESTIONS[:5]
BEFORE: Final = (
    "Hi, ",
    "Hello, ",
    "Please, ",
    "So, ",
    "Hey, ",
    "Thanks. ",
    "Great. ",
    "Ok, ",
    "Now, ",
    "A question: ",
)
AFTER: Final = (
    " please",
    " Thanks!",
    " Be brief.",
    " I am new to Python.",
    " In one sentence, please.",
    " Thank you.",
)
FOLLOW_UPS: Final = (
    "And {}?", "What about {}?", "How about {}?", "And what does {} do?", "And what is {}?", "Now {}.",
)  # fmt: skip
AGAIN: Final = (
    "Say that again.", "Please repeat that.", "Again?", "What did you say?", "Can you repeat that?",
)  # fmt: skip

# Types whose methods can be asked for by their bare names; if two types have one, the first counts.
BARE: Final = (
    "str", "list", "dict", "set", "tuple", "int", "float", "bytes", "math", "itertools", "functools",
    "random", "statistics", "json", "os.path", "collections", "heapq", "bisect", "copy", "textwrap",
    "deque", "datetime",
)  # fmt: skip

SYSTEMS: Final = (
    "You are a helpful assistant.", "You are a helpful, honest and concise assistant.",
    "Answer in one sentence.", "You are a Python expert.", "Be brief.",
    "You are Dal Segno's demo model.", "You answer questions about Python.",
    "You are a pirate. Always talk like one.", "Never talk about cheese.",
    "Today is a fine day in March 2025.",
)  # fmt: skip

# Topics that the model must refuse. None of them is in the corpus.
STRANGERS: Final = (
    "numpy.array", "pandas.DataFrame", "torch.nn.Linear", "asyncio.run", "subprocess.run", "os.remove",
    "sys.argv", "socket.socket", "threading.Thread", "requests.get", "logging.info", "pathlib.Path",
    "lambda", "yield", "await", "async", "for", "while", "if", "def", "class", "return", "import",
    "with", "try", "raise", "pip", "venv", "pytest", "django", "flask", "numpy", "pandas", "torch",
    "asyncio", "subprocess", "kubernetes", "linux", "javascript", "rust", "haskell", "java", "docker",
    "git", "bash", "vim", "emacs", "sql", "html5", "css", "react", "jquery", "the weather", "the time",
    "the moon", "a cat", "a dog", "love", "life", "music", "money", "the meaning of life",
    "quantum physics", "the universe", "the stock market", "gravity", "evolution", "history", "football",
    "chess",
)  # fmt: skip
OTHER_QUESTIONS: Final = (
    "What is the capital of {place}?", "Where is {place}?", "How many people live in {place}?",
    "What is {n} plus {n}?", "What is {n} times {n}?", "{n} + {n}", "Write a poem about {thing}.",
    "Write a story about {thing}.", "Tell me a joke.", "Tell me a joke about {thing}.",
    "Who was {person}?", "Who is {person}?", "Do you like {thing}?", "Translate {thing} into {tongue}.",
    "Do you speak {tongue}?", "What do you think about {thing}?", "Sing a song.",
    "What is the weather in {place}?", "What time is it?", "What day is it?", "Why is the sky blue?",
    "asdf", "{n}", "Write a program that prints {thing}.", "Write a function that adds {n} numbers.",
    "Fix my code.", "Why?", "How?", "How old are you?", "Where are you?",
    "Give me a recipe for {thing}.", "How do I cook {thing}?", "Who won?", "Can you write code?",
    "Summarise this text.", "Count to {n}.", "Is {thing} better than {thing}?", "What?",
)  # fmt: skip
FILLERS: Final[Mapping[str, tuple[str, ...]]] = {
    "place": (
        "France", "Germany", "Italy", "Japan", "Brazil", "Kenya", "Norway", "Paris", "Berlin", "London",
        "Peru",
    ),
    "thing": (
        "cheese", "bread", "soup", "the sea", "a cat", "two dogs", "rain", "winter", "cars", "hello",
        "trains",
    ),
    "person": (
        "Ada Lovelace", "Alan Turing", "Bach", "Mozart", "Einstein", "the president", "Guido van Rossum",
    ),
    "tongue": (
        "French", "German", "Spanish", "Latin", "Chinese", "Dutch",
    ),
}  # fmt: skip
SYLLABLES: Final = (
    "ba", "co", "du", "fe", "gli", "hop", "ki", "lam", "mor", "nu", "pex", "qua", "ro", "sta", "tru",
    "vi", "zor",
)  # fmt: skip
