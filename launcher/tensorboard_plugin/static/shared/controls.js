// The small parts above a view: filters, choices, search fields.

import { el, svg } from './dom.js';
import { FILTER_NAMES, filterValues } from '../model.js';

/**
 * Chips for strategy, devices and precision; a group with one value is not worth showing.
 * @param {Run} run
 * @param {State} state
 */
export function filters(run, state) {
  return FILTER_NAMES.map((name) => ({ name, values: filterValues(run, name) }))
    .filter(({ values }) => values.length > 1)
    .map(({ name, values }) =>
      el(
        'div',
        { class: 'group', role: 'group', 'aria-label': name },
        el('span', { class: 'name' }, name),
        values.map((value) => chip(name, value, values, state)),
      ),
    );
}

/** @param {FilterName} name @param {string} value @param {string[]} values @param {State} state */
function chip(name, value, values, state) {
  const chosen = state.list(name) ?? values;
  const pressed = chosen.includes(value);
  const toggled = pressed ? chosen.filter((other) => other !== value) : [...chosen, value];
  const all = toggled.length === values.length;
  return el(
    'button',
    {
      class: 'chip',
      type: 'button',
      'aria-pressed': String(pressed),
      'data-key': `${name}:${value}`,
      // The last one can't be switched off: nothing would be left to look at.
      onclick: () => toggled.length && state.go({ [name]: all ? null : toggled.join('~') }),
    },
    value,
  );
}

/**
 * Variants as choices.
 * @param {{ id: string, label: string }[]} variants
 * @returns {Options}
 */
export function optionsOf(variants) {
  return variants.map(({ id, label }) => [id, label]);
}

/**
 * A drop-down list of `[value, text]`.
 * @param {string} label
 * @param {Options} options
 * @param {string} value
 * @param {(value: string) => void} onpick
 */
export function picker(label, options, value, onpick) {
  const select = el(
    'select',
    {
      class: 'select',
      'aria-label': label,
      'data-key': label,
      onchange: (event) => onpick(event.currentTarget.value),
    },
    options.map(([key, text]) => el('option', { value: key, selected: key === value }, text)),
  );
  return el('span', { class: 'picker' }, select);
}

/**
 * A search field; `/` puts the cursor into it (the app listens), Esc empties and leaves it.
 * @param {string} label
 * @param {string} value
 * @param {{ oninput: (text: string) => void, onenter?: (isBack: boolean) => void, onleave?: () => void }} actions
 */
export function searchField(label, value, { oninput, onenter, onleave }) {
  let timer = 0;
  const report = () => {
    clearTimeout(timer);
    timer = 0;
    oninput(input.value);
  };
  const input = el('input', {
    type: 'search',
    'aria-label': label,
    placeholder: label,
    value,
    'data-key': 'search',
    'data-search': true,
    spellcheck: 'false',
    autocomplete: 'off',
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(report, 120);
    },
    onkeydown: (event) => {
      if (event.key === 'Enter') {
        if (timer) report(); // Enter means what the field holds, not what it held a moment ago
        onenter?.(event.shiftKey);
      }
      if (event.key !== 'Escape') return;
      event.stopPropagation();
      clearTimeout(timer);
      timer = 0;
      input.value = '';
      input.blur();
      onleave?.();
    },
  });
  const glass = svg(
    'svg',
    { viewBox: '0 0 12 12', 'aria-hidden': 'true' },
    svg('circle', { cx: 5, cy: 5, r: 3.6 }),
    svg('path', { d: 'M7.8 7.8 L11 11' }),
  );
  return el('span', { class: 'search' }, glass, input, el('kbd', { 'aria-hidden': 'true' }, '/'));
}

/**
 * A few choices of which one is on.
 * @param {string} label
 * @param {Options} options
 * @param {string} value
 * @param {(value: string) => void} onpick
 */
export function segmented(label, options, value, onpick) {
  return el(
    'span',
    { class: 'segmented', role: 'group', 'aria-label': label },
    options.map(([key, text]) =>
      el(
        'button',
        {
          type: 'button',
          'aria-pressed': String(key === value),
          'data-key': `${label}:${key}`,
          onclick: () => onpick(key),
        },
        text,
      ),
    ),
  );
}

/**
 * The two lines that answer the view's question.
 * @param {string} sentence
 * @param {string | null} sub
 */
export function headline(sentence, sub) {
  return [el('h1', {}, sentence), sub ? el('p', { class: 'sub' }, sub) : null];
}
