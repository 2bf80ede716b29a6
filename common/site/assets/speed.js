// The chart of the start page: Vega draws it again for each choice.
"use strict";
const choices = document.getElementById("choices");
const numbers = { d: Number, causal: (text) => text === "yes", s: (text) => (text === "mean" ? text : Number(text)) };
for (const select of choices.elements) {
  if (select.name && [...select.options].some((option) => option.value === kept.get(select.name))) select.value = kept.get(select.name);
}
function tell(_, event, __, words) {
  if (!words) return hush();
  say((into) => {
    into.textContent = "";
    for (const [name, value] of Object.entries(words)) {
      if (value == null || ["", "null", "NaN"].includes(value)) continue;
      const line = into.appendChild(document.createElement("div"));
      line.textContent = name === "name" ? value : `${name}: ${value}`;
    }
  }, event.clientX, event.clientY);
}
const spec = JSON.parse(document.getElementById("spec").textContent);
vegaEmbed("#chart", spec, { mode: "vega", renderer: "svg", actions: false, tooltip: tell }).then(({ view }) => {
  const leftOuts = JSON.parse(document.getElementById("left-outs").textContent);
  const choose = () => {
    const key = [...choices.elements].map((select) => select.value).join(" ");
    document.getElementById("left-out").textContent = leftOuts[key];
    for (const select of choices.elements) view.signal(select.name, (numbers[select.name] ?? String)(select.value));
    view.runAsync().then(() => dispatchEvent(new Event("drawn")));
  };
  choices.onchange = (event) => { keep(event.target.name, event.target.value); choose(); };
  choose();
});
