// Elements from names, attributes and children. Text only ever enters as text nodes: nothing here, and
// nothing that uses it, parses markup.

const SVG = 'http://www.w3.org/2000/svg';

/** An HTML element. `on…` attributes are listeners, `style` is an object of CSS properties. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) setAttribute(element, key, value);
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

function setAttribute(element, key, value) {
  if (value == null || value === false) return;
  if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
  else if (key === 'style') setStyle(element, value);
  else if (key === 'class') element.setAttribute('class', value);
  else element.setAttribute(key, value === true ? '' : String(value));
}

// Through the object model: a style attribute as text would need an exception in the security policy.
function setStyle(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, String(value));
}

/** Text that only screen readers get. */
export function hidden(text) {
  return el('span', { class: 'visually-hidden' }, text);
}

/** A table for screen readers with the figures that a chart draws. */
export function hiddenTable(caption, header, rows) {
  const cells = (name, texts, attributes) => texts.map((text) => el(name, attributes, String(text)));
  const table = el(
    'table',
    {},
    el('caption', {}, caption),
    el('thead', {}, el('tr', {}, cells('th', header, { scope: 'col' }))),
    el(
      'tbody',
      {},
      rows.map((row) => el('tr', {}, cells('td', row, {}))),
    ),
  );
  // A table itself is as high as its rows, even beyond the end of the page.
  return el('div', { class: 'visually-hidden' }, table);
}

/** Replaces what is in `parent`, keeping the focus on the element with the same `data-key`. */
export function replace(parent, ...children) {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset?.key : null;
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

const measure = document.createElement('canvas').getContext('2d');

/** The width of the widest of these texts on the page, in px. */
export function widest(texts, sizePx) {
  measure.font = `${sizePx}px ${getComputedStyle(document.body).fontFamily}`;
  return texts.reduce((most, text) => Math.max(most, measure.measureText(text).width), 0);
}

/** Calls `redraw` when the width of `element` changes; the observer ends with the element. */
export function onWidth(element, redraw) {
  let width = 0;
  const observer = new ResizeObserver(([entry]) => {
    if (!element.isConnected) return observer.disconnect();
    const now = Math.round(entry.contentRect.width);
    if (now === width || now === 0) return undefined;
    width = now;
    return redraw(now);
  });
  observer.observe(element);
}

/** Whether typing goes into a field, so that single keys are no commands. */
export function isTyping(event) {
  return (
    /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey
  );
}
