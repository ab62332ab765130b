// One small text beside the pointer, for all views.

import { el } from './dom.js';

const tip = el('div', { class: 'tip', role: 'tooltip', hidden: true });

/** Shows `text` at a place of the window; stays inside it. */
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

/** Attributes that show `text` (or what `text(event)` gives) while the pointer or the focus is here. */
export function tipped(text) {
  const say = (event) => (typeof text === 'function' ? text(event) : text);
  return {
    onpointermove: (event) => {
      const said = say(event);
      if (said) showTip(said, event.clientX, event.clientY);
      else hideTip();
    },
    onpointerleave: hideTip,
    onfocus: (event) => {
      const box = event.target.getBoundingClientRect();
      const said = say(event);
      if (said && event.target.matches(':focus-visible')) showTip(said, box.left, box.bottom - 12);
    },
    onblur: hideTip,
  };
}
