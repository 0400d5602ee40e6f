"use strict";
const tip = document.getElementById("tip");
const hide = (svg) => {
  tip.style.visibility = "hidden";
  svg.querySelector(".cursor").setAttribute("visibility", "hidden");
};
const format = (value, unit) => {
  const text = unit === "%" ? String(+value.toFixed(value < 1 ? 3 : 2)) : String(+value.toPrecision(4));
  return unit === "%" ? text + "\u2009%" : text + unit;
};
const cell = (name, text, parent) => {
  const made = parent.appendChild(document.createElement(name));
  made.textContent = text;
  return made;
};
const show = (svg, values, event) => {
  const box = svg.getBoundingClientRect();
  const at = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
  let near = 0;
  values.at.forEach((place, i) => {
    if (Math.abs(place - at) < Math.abs(values.at[near] - at)) near = i;
  });
  const cursor = svg.querySelector(".cursor");
  cursor.setAttribute("x1", values.at[near]);
  cursor.setAttribute("x2", values.at[near]);
  cursor.setAttribute("visibility", "visible");
  tip.replaceChildren();
  cell("b", values.name + " " + values.x[near], tip);
  const hidden = (entry) => [...svg.querySelectorAll("g.off")].some((g) => g.dataset.label === entry);
  const rows = values.lines.filter(([, , y, entry]) => y[near] !== null && !hidden(entry));
  rows.sort((a, b) => b[2][near] - a[2][near]);
  for (const [label, color, y] of rows.slice(0, 12)) {
    const row = tip.appendChild(document.createElement("div"));
    cell("i", "", row).style.background = color;
    row.append(label);
    cell("span", format(y[near], values.unit), row);
  }
  if (rows.length > 12) cell("div", "and " + (rows.length - 12) + " more", tip);
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
  tip.style.visibility = rows.length ? "visible" : "hidden";
};
for (const figure of document.querySelectorAll("figure.card")) {
  const svg = figure.querySelector("svg.plot");
  const values = JSON.parse(svg.dataset.values);
  if (values.at.length) {
    svg.addEventListener("pointermove", (event) => show(svg, values, event));
    svg.addEventListener("pointerdown", (event) => show(svg, values, event));
    svg.addEventListener("pointerleave", () => hide(svg));
  }
  const lines = [...svg.querySelectorAll("g[data-series]")];
  for (const button of figure.querySelectorAll(".legend button")) {
    const mine = (line) => line.dataset.label === button.dataset.label;
    button.addEventListener("click", () => {
      const off = button.classList.toggle("off");
      lines.filter(mine).forEach((line) => line.classList.toggle("off", off));
    });
    button.addEventListener("pointerenter", () =>
      lines.forEach((line) => line.classList.toggle("back", !mine(line))));
    button.addEventListener("pointerleave", () => lines.forEach((line) => line.classList.remove("back")));
  }
}
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1200);
  });
}
