// One small text next to the pointer, for all views.

import { el } from './dom.js';

const tip = el('div', { class: 'tip', role: 'tooltip', hidden: true });

/**
 * Shows `text` at a place of the window; stays inside it.
 * @param {string} text
 * @param {number} x
 * @param {number} y
 */
export function showTip(text, x, y) {
  if (!tip.isConnected) document.body.append(tip);
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 8) : y + 18}px`;
}

export function hideTip() {
  tip.hidden = true;
}

/**
 * Attributes that show `text` while the pointer or the focus is here.
 * @param {string} text
 * @returns {Attributes<HTMLElement>}
 */
export function tipped(text) {
  return {
    onpointermove: (event) => showTip(text, event.clientX, event.clientY),
    onpointerleave: hideTip,
    onfocus: ({ currentTarget }) => {
      const box = currentTarget.getBoundingClientRect();
      if (currentTarget.matches(':focus-visible')) showTip(text, box.left, box.bottom - 12);
    },
    onblur: hideTip,
  };
}
