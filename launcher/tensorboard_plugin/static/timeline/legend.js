// The legend and the keys above the timeline.

import { el } from '../shared/dom.js';
import { legend } from '../shared/phases.js';

/** The phases that blocks can have. */
export function legendHere() {
  const list = legend(['compute', 'transfer', 'wait', 'copy', 'input']);
  list.style.marginLeft = '0';
  return list;
}

/** What single keys do. */
export function keyHints() {
  /** @param {string} name */
  const key = (name) => el('kbd', {}, name);
  return el(
    'div',
    { class: 'keys', 'aria-hidden': 'true' },
    key('W'),
    key('S'),
    'zoom \u00b7',
    key('A'),
    key('D'),
    'pan \u00b7',
    key('F'),
    'fit \u00b7',
    key('/'),
    'search',
  );
}
