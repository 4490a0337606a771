// The reasoning of models that think in writing, by the marks of their format (docs/http.md, Reasoning).

const MARKS = {
  think: ["<think>", "</think>"],
  mistral: ["[THINK]", "[/THINK]"],
  seed: ["<seed:think>", "</seed:think>"],
  gemma: ["<|channel>thought", "<channel|>"],
};

/** Divide a text into its reasoning and its answer. `isOpen`: the prompt ended with the opening mark. */
export function divided(text, format, isOpen) {
  const marks = MARKS[format];
  if (!marks) return { thought: "", answer: text };
  const [opening, closing] = marks;
  const begin = text.indexOf(opening);
  if (!isOpen && (begin < 0 || text.slice(0, begin).trim())) return { thought: "", answer: text };
  const start = begin < 0 ? 0 : begin + opening.length;
  const end = text.indexOf(closing, start);
  if (end < 0) return { thought: text.slice(start).trim(), answer: "" };
  return { thought: text.slice(start, end).trim(), answer: text.slice(end + closing.length).trimStart() };
}
