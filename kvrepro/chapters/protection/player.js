// What each policy keeps of one prompt, at a budget that the reader sets. The data stand in a script element beside it.
(() => {
  const root = document.currentScript.parentElement;
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const one = (name) => root.querySelector(`[data-part=${name}]`);
  const [budget, reading, guard, policy, play] = ["budget", "reading", "guard", "policy", "play"].map(one);
  const strips = [...root.querySelectorAll("canvas")];
  const text = one("text");
  const words = data.tokens.map((token) => Object.assign(document.createElement("span"), { textContent: token }));
  text.append(...words);
  for (const [name, [first, last]] of Object.entries(data.spans))
    words.slice(first, last + 1).forEach((word) => { word.dataset.span = name; });

  const bits = (name) => data.kept[[name, reading.value, guard.checked ? 1 : 0, data.budgets[budget.value]].join("|")];
  const kept = (name) => {
    const packed = atob(bits(name) || "");
    return data.tokens.map((_, i) => Boolean((packed.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1));
  };

  function strip(canvas, tokens) {
    const draw = canvas.getContext("2d");
    const ink = getComputedStyle(root).color;
    draw.clearRect(0, 0, canvas.width, canvas.height);
    draw.globalAlpha = 0.12;
    draw.fillStyle = ink;
    draw.fillRect(0, 0, canvas.width, 18);
    draw.globalAlpha = 1;
    draw.fillStyle = ["#000000", "#5F5F5F"].includes(canvas.dataset.colour) ? ink : canvas.dataset.colour; // greys vanish in the dark
    const step = canvas.width / tokens.length;
    tokens.forEach((there, i) => { if (there) draw.fillRect(i * step, 0, Math.max(1, step), 18); });
    draw.fillStyle = ink;
    for (const [first, last] of Object.values(data.spans))
      draw.fillRect(first * step, 20, Math.max(3, (last + 1 - first) * step), 4);
  }

  function show() {
    one("said").textContent = `${data.budgets[budget.value]} of ${data.tokens.length} tokens`;
    budget.setAttribute("aria-valuetext", one("said").textContent);
    for (const canvas of strips) {
      const tokens = kept(canvas.dataset.policy);
      const held = ([first, last]) => tokens.slice(first, last + 1).filter(Boolean).length;
      const parts = Object.entries(data.spans).map(([name, at]) => `${held(at)} of ${at[1] + 1 - at[0]} tokens of the ${name}`);
      const total = tokens.filter(Boolean).length;
      strip(canvas, tokens);
      canvas.nextElementSibling.textContent = bits(canvas.dataset.policy) === undefined
        ? `${canvas.dataset.name} cannot be run so.`
        : `${canvas.dataset.name} keeps ${[`${total} tokens`, ...parts].join(", ")}.`;
      if (canvas.dataset.policy === policy.value) words.forEach((word, i) => { word.className = tokens[i] ? "" : "gone"; });
    }
  }

  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Shrink step by step"; };
  play.addEventListener("click", () => {
    if (timer) return stop();
    budget.value = budget.max;
    play.textContent = "Stop";
    show();
    timer = setInterval(() => { if (budget.value === "0") return stop(); budget.value -= 1; show(); }, 900);
  });
  [budget, reading, guard, policy].forEach((control) => control.addEventListener("input", show));
  new MutationObserver(show).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  root.hidden = false;
  show();
})();
