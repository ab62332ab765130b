// Devices: what ran where, and, while a run is going, the machine as it is now.

import { headline, optionsOf, picker } from '../shared/controls.js';
import { el, replace } from '../shared/dom.js';
import { listed, memoryText, number, plural } from '../shared/format.js';
import { lineChart, sparkline, spokenSeries } from './charts.js';
import { showTracedDevices } from './traced.js';
import { follow, FOLLOW_MS } from '../source.js';
import { runningStrip } from '../shared/states.js';

/** So many polls are kept for the sparklines: four minutes. */
const KEPT = 120;
/** @type {[key: Gauge, name: string][]} */
const GAUGES = [
  ['memory_gib', 'memory, GiB'],
  ['utilisation_percent', 'utilisation, %'],
  ['sm_clock_mhz', 'SM clock, MHz'],
  ['power_w', 'power, W'],
];
/** @type {{ [G in Gauge]: 'memory_total_gib' | 'sm_clock_max_mhz' | 'power_limit_w' | null }} */
const LIMITS = {
  memory_gib: 'memory_total_gib',
  utilisation_percent: null,
  sm_clock_mhz: 'sm_clock_max_mhz',
  power_w: 'power_limit_w',
};
const RANKS_DRAWN = 8;
/** A value this near to its limit has reached it. */
const REACHED = 0.97;

/**
 * Draws the view into `host`; while the run is going it asks again and again.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showDevices(host, app) {
  if (app.run.isTraces) return showTracedDevices(host, app);
  const view = new Devices(host, app, await progressOf(app));
  view.draw();
  if (app.source.live && view.progress.status === 'running') follow(() => view.look(), host, view.controller.signal);
  return view;
}

/** @param {OpenApp} app */
function progressOf(app) {
  return app.source.get('progress', { run: app.run.name }, app.signal);
}

class Devices {
  /** @param {HTMLElement} host @param {OpenApp} app @param {ProgressAnswer} progress */
  constructor(host, app, progress) {
    this.host = host;
    this.app = app;
    this.keeps = true;
    this.progress = progress;
    /** @type {Map<string, LiveDevice[]>} */
    this.history = new Map();
    this.controller = new AbortController();
    this.remember();
  }

  stop() {
    this.controller.abort();
  }

  update() {
    this.draw();
  }

  async look() {
    this.progress = await progressOf(this.app);
    this.remember();
    this.draw();
    if (this.progress.status !== 'running') this.stop();
  }

  remember() {
    for (const device of this.progress.live) {
      const past = this.history.get(device.device) ?? [];
      this.history.set(device.device, [...past, device].slice(-KEPT));
    }
  }

  draw() {
    const { progress } = this;
    const variant = this.chosen();
    replace(
      this.host,
      headline(this.sentence(), this.subSentence()),
      runningStrip(progress),
      progress.live.length ? this.liveTable() : this.ranTable(variant),
      this.charts(variant),
    );
  }

  /** The variant whose steps are drawn: the one asked for, the one at work, or the fastest. */
  chosen() {
    const { run, state } = this.app;
    const measured = this.progress.variants.filter((variant) => variant.ranks.some((rank) => rank.step.length));
    const wanted = [state.get('variant'), this.progress.stage?.variant, run.leader?.id].map((id) =>
      measured.find((each) => each.id === id),
    );
    return wanted.find(Boolean) ?? measured[0] ?? null;
  }

  sentence() {
    const { live } = this.progress;
    const capped = live.filter((device) => atPowerCap(device));
    if (capped.length) return cappedSentence(capped, live);
    const devices = new Set(this.app.run.variants.flatMap((variant) => variant.planned.devices));
    const variants = this.app.run.variants.length;
    if (live.length)
      return live[0].device === 'cpu'
        ? live[0].utilisation_percent == null
          ? 'The CPU is at work.'
          : `The CPU has ${number(live[0].utilisation_percent)} % of its cores at work.`
        : `${plural(live.length, 'device')} at work, none at its power cap.`;
    return `${plural(variants, 'variant')} ran on ${listed([...devices].slice(0, 4))}${devices.size > 4 ? ` and ${devices.size - 4} more` : ''}.`;
  }

  subSentence() {
    const { live } = this.progress;
    const others = live.filter((device) => (device.pids?.length ?? 0) > 1).map((device) => device.device);
    const shared = others.length ? `Several processes use ${listed(others)}. ` : '';
    if (live.length) return `${shared}Updated every ${FOLLOW_MS / 1000} s while the run is going.`;
    return 'Peak memory is what each rank had allocated at most; step times are those of the timed rounds.';
  }

  liveTable() {
    const { live } = this.progress;
    /** @param {Gauge} key */
    const has = (key) => key === 'utilisation_percent' || live.some((device) => device[key] != null);
    const columns = GAUGES.filter(([key]) => has(key));
    return el(
      'table',
      { class: 'grid devices', 'aria-label': 'devices now' },
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          el('th', { scope: 'col' }, 'device'),
          columns.map(([, name]) => el('th', { scope: 'col' }, name)),
          el('th', { scope: 'col', class: 'c-link' }, 'processes'),
        ),
      ),
      el(
        'tbody',
        {},
        live.map((device) =>
          el(
            'tr',
            {},
            el('td', {}, this.who(device)),
            columns.map(([key]) => el('td', {}, this.gauge(device, key))),
            el(
              'td',
              { class: 'c-link' },
              (device.pids ?? []).slice(0, 4).map((pid) => el('p', {}, `pid ${number(pid)}`)),
            ),
          ),
        ),
      ),
    );
  }

  /**
   * The upper end of a figure's scale: 100 %, or the largest limit or value of all devices.
   * @param {Gauge} key
   */
  fullScale(key) {
    if (key === 'utilisation_percent') return 100;
    const values = [...this.history.values()].flat().map((device) => device[key] ?? 0);
    return Math.max(1, ...this.progress.live.map((device) => limitOf(device, key) ?? 0), ...values);
  }

  /** @param {LiveDevice} device */
  who(device) {
    const ranks = (
      this.progress.variants.find((variant) => variant.id === this.progress.stage?.variant)?.ranks ?? []
    ).filter((rank) => rank.device === device.device || device.device === 'cpu');
    return [
      el('div', { class: 'strong' }, device.device),
      device.name ? el('p', { class: 'plain' }, device.name) : null,
      ranks
        .slice(0, 4)
        .map((rank) => el('p', {}, rankText(rank))),
      device.temperature_c == null ? null : el('p', {}, `${number(device.temperature_c)} \u00b0C`),
    ];
  }

  /** @param {LiveDevice} device @param {Gauge} key */
  gauge(device, key) {
    const value = device[key];
    if (value == null) return el('p', {}, '\u2013');
    const limit = limitOf(device, key);
    const isLimiting =
      (key === 'power_w' && atPowerCap(device)) ||
      (key === 'sm_clock_mhz' && atPowerCap(device) && value < REACHED * (limit ?? 0)) ||
      (key === 'memory_gib' && limit != null && value > REACHED * limit);
    const of = {
      memory_gib: limit == null ? '' : `of ${number(limit, 1)}`,
      utilisation_percent: 'now',
      sm_clock_mhz: limit == null ? '' : `of ${number(limit)}`,
      power_w: limit == null ? '' : `cap ${number(limit)}${isLimiting ? ', reached' : ''}`,
    }[key];
    const past = (this.history.get(device.device) ?? []).map((each) => each[key]).filter((each) => each != null);
    const spoken = spokenSeries(device.device, past, key.slice(key.lastIndexOf('_') + 1));
    return [
      el(
        'div',
        {},
        el(
          'span',
          { class: `big ${isLimiting ? 'slower' : ''}` },
          number(value, key === 'memory_gib' ? 1 : 0),
        ),
        el('span', { class: 'of' }, of),
      ),
      sparkline(past, this.fullScale(key), limit, spoken, isLimiting),
    ];
  }

  /**
   * What ran where, once nothing runs any more.
   * @param {VariantProgress | null} chosen
   */
  ranTable(chosen) {
    const { run } = this.app;
    const variant = chosen ? run.byId.get(chosen.id) : run.choose(this.app.state.get('variant'), run.ranked);
    const ranks = variant?.ranks.length ? variant.ranks : (chosen?.ranks ?? []);
    const gpus = run.answer.host?.gpus ?? [];
    /** @param {string | null} device */
    const named = (device) => gpus.find((gpu) => gpu.device === device);
    if (!ranks.length) return el('p', { class: 'muted' }, 'No steps have been recorded yet.');
    /** @param {RankFigures | RankProgress} rank @returns {Child[]} */
    const cells = (rank) => {
      const gpu = named(rank.device);
      return [
        [
          el('div', { class: 'strong' }, rank.device),
          el('p', {}, rankText(rank)),
        ],
        gpu?.name ?? run.answer.host?.cpu_model ?? '',
        gauged(rank.peak_gib, gpu?.memory_gib),
        gpu?.power_limit_w == null ? '' : `cap ${number(gpu.power_limit_w)} W`,
        gpu?.max_sm_clock_mhz == null ? '' : `up to ${number(gpu.max_sm_clock_mhz)} MHz`,
      ];
    };
    const rows = ranks.slice(0, 64).map(cells);
    const kept = ['device', 'name', 'peak memory', 'power', 'SM clock']
      .map((name, index) => ({ name, index }))
      .filter(({ index }) => rows.some((row) => row[index] !== ''));
    return [
      this.picker(chosen),
      el(
        'table',
        { class: 'grid devices narrow', 'aria-label': 'what ran where' },
        el(
          'thead',
          {},
          el(
            'tr',
            {},
            kept.map(({ name }) => el('th', { scope: 'col' }, name)),
          ),
        ),
        el(
          'tbody',
          {},
          rows.map((row) =>
            el(
              'tr',
              {},
              kept.map(({ index }) => el('td', {}, row[index])),
            ),
          ),
        ),
      ),
    ];
  }

  /** @param {VariantProgress | null} chosen */
  picker(chosen) {
    const measured = this.progress.variants.filter((variant) => variant.ranks.some((rank) => rank.step.length));
    if (measured.length < 2 || !chosen) return el('div', { class: 'controls' });
    return el(
      'div',
      { class: 'controls' },
      picker(
        'variant',
        optionsOf(measured),
        chosen.id,
        (id) => this.app.state.go({ tab: 'devices', variant: id }),
      ),
    );
  }

  /** @param {VariantProgress | null} variant */
  charts(variant) {
    const ranks = (variant?.ranks ?? []).filter((rank) => rank.step.length).slice(0, RANKS_DRAWN);
    if (!variant || !ranks.length) return null;
    /** @param {'step_ms' | 'forward_ms'} key */
    const series = (key) =>
      ranks
        .filter((rank) => rank[key]?.some((ms) => ms > 0))
        .map((rank) => ({ name: `rank ${rank.rank}`, x: rank.step, y: rank[key] }));
    /** @param {string} title @param {'step_ms' | 'forward_ms'} key */
    const chart = (title, key) => {
      const lines = series(key);
      return lines.length
        ? el(
            'section',
            {},
            el('h2', {}, title),
            lineChart(lines, lines.map((line) => spokenSeries(line.name, line.y, 'ms')).join('; ')),
          )
        : null;
    };
    return el(
      'div',
      { class: 'charts' },
      chart(`Step time by step of ${variant.label}, ms`, 'step_ms'),
      chart('Forward pass by step, before ranks wait for each other, ms', 'forward_ms'),
    );
  }
}

/** @param {LiveDevice} device @param {Gauge} key */
function limitOf(device, key) {
  const limit = LIMITS[key];
  return limit && device[limit];
}

/**
 * `rank 1 · 34 samples`; a program's batch is not known.
 * @param {{ rank: number, local_batch: number | null }} rank
 */
function rankText({ rank, local_batch: batch }) {
  return batch == null ? `rank ${rank}` : `rank ${rank} \u00b7 ${plural(batch, 'sample')}`;
}

/** @param {LiveDevice} device */
function atPowerCap(device) {
  return (
    device.power_w != null && device.power_limit_w != null && device.power_w >= REACHED * device.power_limit_w
  );
}

/** @param {LiveDevice[]} capped @param {LiveDevice[]} live */
function cappedSentence(capped, live) {
  const [first] = capped;
  const fastest = Math.max(...live.map((device) => device.sm_clock_mhz ?? 0));
  const lower = first.sm_clock_mhz ? 100 * (1 - first.sm_clock_mhz / fastest) : 0;
  const clocks = lower >= 1 ? ` and clocks ${number(lower)} % lower than the fastest device` : '';
  return `${listed(capped.map((device) => device.device))} ${capped.length > 1 ? 'run at their' : 'runs at its'} power cap of ${number(first.power_limit_w)} W${clocks}.`;
}

/** @param {number | null} value @param {number | undefined} limit @returns {Child} */
function gauged(value, limit) {
  if (value == null) return '';
  return [
    el('span', { class: 'big' }, memoryText(value)),
    limit == null ? null : el('span', { class: 'of' }, `of ${memoryText(limit)}`),
  ];
}
