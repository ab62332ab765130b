// Devices: what ran where, and, while a run goes on, the machine as it is now.

import { headline, picker } from './controls.js';
import { el, replace } from './dom.js';
import { coarse, listed, number, plural } from './format.js';
import { lineChart, sparkline, spokenSeries } from './charts.js';
import { showTracedDevices } from './devices_traced.js';
import { pause } from './source.js';
import { meter } from './states.js';

const POLL_MS = 2000;
/** So many polls are kept for the sparklines: four minutes. */
const KEPT = 120;
const RANKS_DRAWN = 8;
/** A value this near to its limit has reached it. */
const REACHED = 0.97;

const STAGES = {
  start: 'starting',
  build: 'building the model',
  check: 'checking gradients',
  warmup: 'warming up',
  round: 'measuring',
  profile: 'tracing',
  done: 'ending',
};

/** Draws the view into `host`; while the run goes on it asks again and again. */
export async function showDevices(host, app) {
  if (app.run.isTraces) return showTracedDevices(host, app);
  const view = new Devices(host, app);
  await view.look();
  view.poll();
  return view;
}

class Devices {
  constructor(host, app) {
    Object.assign(this, { host, app, keeps: true });
    this.history = new Map();
    this.controller = new AbortController();
  }

  stop() {
    this.controller.abort();
  }

  update() {
    this.draw();
  }

  async look() {
    this.progress = await this.app.source.get('progress', { run: this.app.run.name }, this.app.signal);
    for (const device of this.progress.live) {
      const past = this.history.get(device.device) ?? [];
      this.history.set(device.device, [...past, device].slice(-KEPT));
    }
    this.draw();
  }

  async poll() {
    const { signal } = this.controller;
    while (!signal.aborted && this.app.source.live && this.progress.status === 'running') {
      try {
        await pause(POLL_MS, signal);
        if (!document.hidden && this.host.getClientRects().length) await this.look();
      } catch (error) {
        if (error.name === 'AbortError') return;
      }
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
    const measured = this.progress.variants.filter((one) => one.ranks.some((rank) => rank.step.length));
    const wanted = [state.get('variant'), this.progress.stage?.variant, run.fastest?.id].map((id) =>
      measured.find((one) => one.id === id),
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
    if (live.length) return `${shared}Looked at every ${POLL_MS / 1000} s while the run goes on.`;
    return 'Peak memory is what each rank had allocated at most; step times are those of the timed rounds.';
  }

  liveTable() {
    const { live } = this.progress;
    const most = (key, limit) =>
      Math.max(
        1,
        ...live.map((device) => device[limit] ?? 0),
        ...[...this.history.values()].flat().map((device) => device[key] ?? 0),
      );
    const scales = {
      memory_gib: most('memory_gib', 'memory_total_gib'),
      utilisation_percent: 100,
      sm_clock_mhz: most('sm_clock_mhz', 'sm_clock_max_mhz'),
      power_w: most('power_w', 'power_limit_w'),
    };
    const has = (key) => key === 'utilisation_percent' || live.some((device) => device[key] != null);
    const columns = [
      ['memory_gib', 'memory, GiB'],
      ['utilisation_percent', 'utilisation, %'],
      ['sm_clock_mhz', 'SM clock, MHz'],
      ['power_w', 'power, W'],
    ].filter(([key]) => has(key));
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
            columns.map(([key]) => el('td', {}, this.gauge(device, key, scales[key]))),
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

  who(device) {
    const ranks = (
      this.progress.variants.find((one) => one.id === this.progress.stage?.variant)?.ranks ?? []
    ).filter((rank) => rank.device === device.device || device.device === 'cpu');
    return [
      el('div', { class: 'strong' }, device.device),
      device.name ? el('p', { class: 'plain' }, device.name) : null,
      ranks
        .slice(0, 4)
        .map((rank) => el('p', {}, `rank ${rank.rank} \u00b7 ${plural(rank.local_batch, 'sample')}`)),
      device.temperature_c == null ? null : el('p', {}, `${number(device.temperature_c)} \u00b0C`),
    ];
  }

  gauge(device, key, full) {
    const value = device[key];
    if (value == null) return el('p', {}, '\u2013');
    const limit = {
      memory_gib: device.memory_total_gib,
      sm_clock_mhz: device.sm_clock_max_mhz,
      power_w: device.power_limit_w,
    }[key];
    const isLimiting =
      (key === 'power_w' && atPowerCap(device)) ||
      (key === 'sm_clock_mhz' && atPowerCap(device) && value < REACHED * (limit ?? 0)) ||
      (key === 'memory_gib' && limit && value > REACHED * limit);
    const of = {
      memory_gib: limit == null ? '' : `of ${number(limit, 1)}`,
      utilisation_percent: 'now',
      sm_clock_mhz: limit == null ? '' : `of ${number(limit)}`,
      power_w: limit == null ? '' : `cap ${number(limit)}${isLimiting ? ', reached' : ''}`,
    }[key];
    const past = (this.history.get(device.device) ?? []).map((one) => one[key]).filter((one) => one != null);
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
      sparkline(past, full, limit, spokenSeries(device.device, past, key.split('_').at(-1)), isLimiting),
    ];
  }

  // What ran where, once nothing runs any more.
  ranTable(chosen) {
    const { run } = this.app;
    const variant = chosen ? run.byId.get(chosen.id) : run.choose(this.app.state.get('variant'), run.ranked);
    const ranks = variant?.ranks.length ? variant.ranks : (chosen?.ranks ?? []);
    const gpus = run.answer.host?.gpus ?? [];
    const named = (device) => gpus.find((gpu) => `cuda:${gpu.index}` === device);
    if (!ranks.length) return el('p', { class: 'muted' }, 'No steps have been recorded yet.');
    const cells = (rank) => {
      const gpu = named(rank.device);
      return [
        [
          el('div', { class: 'strong' }, rank.device),
          el('p', {}, `rank ${rank.rank} \u00b7 ${plural(rank.local_batch, 'sample')}`),
        ],
        gpu?.name ?? run.answer.host?.cpu_model ?? '',
        gauged(rank.peak_gib, gpu?.memory_gib),
        gpu?.power_limit_w == null ? '' : `cap ${number(gpu.power_limit_w)} W`,
        gpu?.max_sm_clock_mhz == null ? '' : `up to ${number(gpu.max_sm_clock_mhz)} MHz`,
      ];
    };
    const rows = ranks.slice(0, 64).map(cells);
    const kept = ['device', 'name', 'peak memory, GiB', 'power', 'SM clock']
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

  picker(chosen) {
    const measured = this.progress.variants.filter((one) => one.ranks.some((rank) => rank.step.length));
    if (measured.length < 2) return el('div', { class: 'controls' });
    return el(
      'div',
      { class: 'controls' },
      picker(
        'variant',
        measured.map((one) => [one.id, one.label]),
        chosen.id,
        (id) => this.app.state.go({ tab: 'devices', variant: id }),
      ),
    );
  }

  charts(variant) {
    const ranks = (variant?.ranks ?? []).filter((rank) => rank.step.length).slice(0, RANKS_DRAWN);
    if (!ranks.length) return null;
    const series = (key) =>
      ranks
        .filter((rank) => rank[key]?.some((ms) => ms > 0))
        .map((rank) => ({ name: `rank ${rank.rank}`, x: rank.step, y: rank[key] }));
    const chart = (title, key) => {
      const lines = series(key);
      return lines.length
        ? el(
            'section',
            {},
            el('h2', {}, title),
            lineChart(lines, lines.map((one) => spokenSeries(one.name, one.y, 'ms')).join('; ')),
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

/** What a run does now and how far it is; that it stopped, if it did. */
export function runningStrip({ stage, status, done, seconds_left: left }) {
  if (status !== 'running' || !stage)
    return status === 'stopped'
      ? el(
          'p',
          { class: 'problems' },
          'This run stopped before it was done; gpurun --resume RUN goes on with it.',
        )
      : null;
  const doing =
    stage.stage === 'round'
      ? `round ${number(stage.round)} of ${number(stage.rounds)}`
      : (STAGES[stage.stage] ?? stage.stage);
  return el(
    'div',
    { class: 'running' },
    el('span', { class: 'strong' }, `running: ${[stage.label, doing].filter(Boolean).join(', ')}`),
    meter(done, 'progress of the run'),
    el('span', { class: 'muted' }, left == null ? '' : `${coarse(left)} left`),
  );
}

function atPowerCap(device) {
  return (
    device.power_w != null && device.power_limit_w != null && device.power_w >= REACHED * device.power_limit_w
  );
}

function cappedSentence(capped, live) {
  const [first] = capped;
  const fastest = Math.max(...live.map((device) => device.sm_clock_mhz ?? 0));
  const lower = first.sm_clock_mhz ? 100 * (1 - first.sm_clock_mhz / fastest) : 0;
  const clocks = lower >= 1 ? ` and clocks ${number(lower)} % lower than the fastest device` : '';
  return `${listed(capped.map((device) => device.device))} ${capped.length > 1 ? 'run at their' : 'runs at its'} power cap of ${number(first.power_limit_w)} W${clocks}.`;
}

function gauged(value, limit) {
  if (value == null) return '';
  return [
    el('span', { class: 'big' }, number(value, value < 1 ? 2 : 1)),
    limit == null ? null : el('span', { class: 'of' }, `of ${number(limit, 1)}`),
  ];
}
