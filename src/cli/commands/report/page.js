"use strict";
// Shows the values under the pointer, of all runs in a picture.
(() => {
  const names = JSON.parse(document.getElementById("runs").textContent);
  const tip = document.getElementById("tip");
  const svgName = "http://www.w3.org/2000/svg";

  const element = (name, attributes) => {
    const made = document.createElementNS(svgName, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  // The row whose steps are nearest to `step`; rows are in order.
  const nearest = (rows, step) => {
    let low = 0;
    let high = rows.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rows[middle][1] < step) low = middle + 1;
      else high = middle;
    }
    const before = rows[low - 1];
    return before && step - before[1] < rows[low][0] - step ? before : rows[low];
  };

  const line = (run, text) => {
    const row = document.createElement("div");
    const name = document.createElement("span");
    if (run !== null) {
      const chip = document.createElement("span");
      chip.className = `chip c${run % 8}`;
      name.append(chip, names[run]);
    }
    row.append(name, text);
    return row;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const svg = figure.querySelector("svg");
    const hover = svg.querySelector(".hover");
    const data = JSON.parse(figure.querySelector("script").textContent);
    const [first, last] = data.x;
    const place = (step) => data.left + ((step - first) / (last - first)) * (data.right - data.left);

    const leave = () => {
      tip.hidden = true;
      hover.replaceChildren();
    };

    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const step = first + ((x - data.left) / (data.right - data.left)) * (last - first);
      const found = data.curves.map((curve) => [curve.run, nearest(curve.rows, step)]);
      // Runs that end before are left out, unless none is here.
      const distance = ([, row]) => Math.max(row[0] - step, step - row[1], 0);
      const least = Math.min(...found.map(distance));
      const shown = found.filter((one) => distance(one) <= least + (last - first) * 0.02);
      const [from, to] = shown[0][1];
      const marks = shown.map(([run, row]) =>
        element("circle", { class: `c${run % 8}`, cx: place((row[0] + row[1]) / 2), cy: row[2], r: 4.5 }));
      const at = place((from + to) / 2);
      hover.replaceChildren(element("path", { d: `M${at} ${data.top}V${data.bottom}` }), ...marks);
      const steps = from === to ? `${from}` : `${from} to ${to}`;
      const title = document.createElement("b");
      title.textContent = `${data.x_name} ${steps}`;
      tip.replaceChildren(title, ...shown.map(([run, row]) => line(run, row[3])));
      tip.hidden = false;
      const right = event.clientX + 18 + tip.offsetWidth > window.innerWidth;
      tip.style.left = `${Math.max(4, right ? event.clientX - 18 - tip.offsetWidth : event.clientX + 18)}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4))}px`;
    };

    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", leave);
  }
})();
