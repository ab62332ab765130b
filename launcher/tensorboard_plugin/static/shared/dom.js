// Elements from names, attributes and children. Text only ever enters as text nodes: nothing here, and
// nothing that uses it, parses markup.

const SVG = 'http://www.w3.org/2000/svg';

/**
 * An HTML element. `on…` attributes are listeners, `style` is an object of CSS properties.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {Attributes<HTMLElementTagNameMap[K]>} [attributes]
 * @param {Child[]} children
 */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/**
 * An SVG element.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} name
 * @param {Attributes<SVGElementTagNameMap[K]>} [attributes]
 * @param {Child[]} children
 */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/**
 * @template {HTMLElement | SVGElement} E
 * @param {E} element
 * @param {Attributes<E>} attributes
 * @param {Child[]} children
 */
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) setAttribute(element, key, value);
  element.append(...present(children).flatMap((child) => prose(element, child)));
  return element;
}

const BEFORE_UNIT = /(\d) (?=(?:%|[nµm]?s|min|h|[kMG]?B|[KMG]iB|W|J|MHz|°C)(?![\w]))/g;
const VERBATIM = new Set(['pre', 'code', 'option', 'textarea']);

/**
 * A child as it is read: no line breaks between a figure and its unit, and what is in backticks is code.
 * @param {Element} parent
 * @param {Node | string} child
 * @returns {(Node | string)[]}
 */
function prose(parent, child) {
  if (typeof child !== 'string' || VERBATIM.has(parent.localName)) return [child];
  const joined = child.replace(BEFORE_UNIT, '$1\u00a0');
  if (parent.namespaceURI === SVG) return [joined];
  return joined.split(/`([^`]+)`/).map((part, at) => (at % 2 ? el('code', {}, part) : part));
}

/**
 * The children that there are, without their nesting.
 * @param {Child[]} children
 * @returns {(Node | string)[]}
 */
function present(children) {
  return children.flatMap((child) => {
    if (Array.isArray(child)) return present(child);
    return child == null || child === false ? [] : [child];
  });
}

/** @param {HTMLElement | SVGElement} element @param {string} key @param {unknown} value */
function setAttribute(element, key, value) {
  if (value == null || value === false) return;
  if (typeof value === 'function') element.addEventListener(key.slice(2), (event) => value(event));
  else if (typeof value === 'object') setStyle(element, { ...value });
  else element.setAttribute(key, value === true ? '' : String(value));
}

/**
 * Through the object model: a style attribute as text would need an exception in the security policy.
 * @param {HTMLElement | SVGElement} element
 * @param {Style} properties
 */
function setStyle(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, String(value));
}

/**
 * Text that only screen readers get.
 * @param {string} text
 */
export function hidden(text) {
  return el('span', { class: 'visually-hidden' }, text);
}

/**
 * A table for screen readers with the figures that a chart draws.
 * @param {string} caption
 * @param {string[]} header
 * @param {(string | number)[][]} rows
 */
export function hiddenTable(caption, header, rows) {
  /** @param {'th' | 'td'} name @param {(string | number)[]} texts @param {Attributes<HTMLElement>} attributes */
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

/**
 * Replaces what is in `parent`, keeping the focus on the element with the same `data-key`, and in a field the text and the cursor.
 * @param {Element} parent
 * @param {...Child} children
 * @returns {undefined}
 */
export function replace(parent, ...children) {
  const focused = document.activeElement;
  const key = focused && parent.contains(focused) ? focused.getAttribute('data-key') : null;
  parent.replaceChildren(...present(children).flatMap((child) => prose(parent, child)));
  if (!key) return;
  const next = found(parent, `[data-key="${CSS.escape(key)}"]`);
  next?.focus({ preventScroll: true });
  if (!(next instanceof HTMLInputElement && focused instanceof HTMLInputElement && next.type === 'search')) return;
  next.value = focused.value;
  next.setSelectionRange(focused.selectionStart, focused.selectionEnd);
}

/**
 * The first HTML element in `parent` that the selector has.
 * @param {Element} parent
 * @param {string} selector
 * @returns {HTMLElement | null}
 */
export function found(parent, selector) {
  return parent.querySelector(selector);
}

/**
 * What a canvas is drawn with.
 * @param {HTMLCanvasElement} canvas
 */
export function contextOf(canvas) {
  const context = canvas.getContext('2d');
  if (!context) throw new Error('This browser has no memory left for another canvas.');
  return context;
}

/**
 * A canvas of the size it has on the page, ready to be drawn in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} [height]
 */
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  if (height != null) canvas.style.height = `${height}px`;
  const tall = height ?? canvas.clientHeight;
  const size = [Math.round(width * ratio), Math.round(tall * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = contextOf(canvas);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.textBaseline = 'middle';
  return { context, width, height: tall };
}

const measure = contextOf(document.createElement('canvas'));

/**
 * The width of the widest of these texts on the page, in px.
 * @param {string[]} texts
 * @param {number} sizePx
 */
export function widest(texts, sizePx) {
  measure.font = `${sizePx}px ${getComputedStyle(document.body).fontFamily}`;
  return texts.reduce((most, text) => Math.max(most, measure.measureText(text).width), 0);
}

/**
 * Calls `redraw` when the width of `element` changes; the observer ends with the element.
 * @param {Element} element
 * @param {(width: number) => void} redraw
 */
export function onWidth(element, redraw) {
  let width = 0;
  const observer = new ResizeObserver(([entry]) => {
    if (!element.isConnected) observer.disconnect();
    const now = Math.round(entry?.contentRect.width ?? 0);
    if (now === width || now === 0 || !element.isConnected) return;
    width = now;
    redraw(now);
  });
  observer.observe(element);
}

/**
 * A picture that is drawn anew for each width of its place.
 * @param {Attributes<SVGSVGElement>} attributes
 * @param {(width: number) => SVGElement[]} parts
 */
export function picture(attributes, parts) {
  const root = svg('svg', attributes);
  onWidth(root, (width) => root.replaceChildren(...parts(width)));
  return root;
}

/**
 * Whether typing goes into a field, so that single keys are no commands.
 * @param {KeyboardEvent} event
 */
export function isTyping(event) {
  const isField = event.target instanceof Element && /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  return isField || event.ctrlKey || event.metaKey || event.altKey;
}

/**
 * A text that breaks between its words only: not at the hyphens of an option. A word that is too long for its place
 * breaks after `_` or `=`, if it has any.
 * @param {string} text
 * @returns {Child[]}
 */
export function wholeWords(text) {
  return text.split(' ').flatMap((word, index) => [
    index ? ' ' : '',
    el('span', { class: 'whole' }, word.split(/(?<=[_=])/).flatMap((part, at) => [at ? el('wbr') : '', part])),
  ]);
}
