// Splits before the first launch is done: how far each variant is.

import { headline } from '../shared/controls.js';
import { el, replace } from '../shared/dom.js';
import { number } from '../shared/format.js';
import { runningStrip } from '../shared/states.js';
import { follow } from '../source.js';

/**
 * Draws what goes on into `host` until it is stopped: the page draws the ranking once there is one.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showWaiting(host, app) {
  const controller = new AbortController();
  const look = async () =>
    draw(host, await app.source.get('progress', { run: app.run.name }, controller.signal));
  await look();
  if (app.source.live) follow(look, host, controller.signal);
  return { stop: () => controller.abort() };
}

/** @param {HTMLElement} host @param {ProgressAnswer} progress */
function draw(host, progress) {
  const rows = progress.variants.map((variant) =>
    el(
      'tr',
      { 'data-variant': variant.id },
      el('td', {}, variant.label),
      el('td', { class: 'right' }, number(variant.rounds)),
    ),
  );
  replace(
    host,
    headline(progress.headline ?? '', progress.details),
    runningStrip(progress),
    el(
      'table',
      {
        class: 'grid',
        style: { width: 'min(420px, 100%)', 'margin-top': '12px' },
        'aria-label': 'variants and their rounds so far',
      },
      el(
        'thead',
        {},
        el('tr', {}, el('th', { scope: 'col' }, 'variant'), el('th', { scope: 'col', class: 'right' }, 'rounds so far')),
      ),
      el('tbody', {}, rows),
    ),
  );
}
