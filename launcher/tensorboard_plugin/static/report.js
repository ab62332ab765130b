// The first three views as one file: the same page over answers that stand in the file itself.

import { App } from './app.js';
import { el } from './dom.js';
import { SourceError } from './source.js';
import { Address, State } from './state.js';

/** Draws the report from its data: gzipped JSON in base64, the text of the element `data`. */
export async function renderReport() {
  const data = await unpacked(document.getElementById('data').textContent);
  document.title = `${data.run.title} \u00b7 gpurun`;
  const root = el('div', { id: 'gpurun' });
  document.body.append(root);
  const address = new Address();
  await new App(root, new FileSource(data), new State(address)).start();
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

/** Answers like the server, from what the file holds. */
export class FileSource {
  constructor(data) {
    this.data = data;
    this.live = false;
    this.views = ['splits', 'where', 'timeline'];
    this.timelines = new Map(
      Object.entries(data.timelines).map(([id, one]) => [id, new StoredTimeline(one)]),
    );
  }

  async get(route, parameters = {}) {
    const timeline = this.timelines.get(parameters.variant);
    if (route === 'runs')
      return {
        runs: [{ name: this.data.run.name, title: this.data.run.title, status: 'done' }],
        reload_s: 3600,
      };
    if (route === 'run') return this.data.run;
    if (route === 'steps')
      return {
        variants: Object.fromEntries(
          [parameters.variant]
            .flat()
            .map((id) => [id, this.data.steps[id]])
            .filter(([, steps]) => steps),
        ),
      };
    if (route === 'breakdown') return timeline?.data.breakdown ?? { state: 'none', problems: [] };
    if (route.startsWith('timeline/'))
      return timeline ? timeline.answer(route.slice(9), parameters) : { state: 'none', problems: [] };
    throw new SourceError(`a report as a file has no ${route}`);
  }

  getChanged(route) {
    return this.get(route);
  }

  ready(route, parameters) {
    return this.get(route, parameters);
  }
}

/** One variant's timeline, stored as one answer to `timeline/window` over all of it. */
class StoredTimeline {
  constructor(data) {
    this.data = data;
  }

  answer(name, parameters) {
    if (this.data.meta.state !== 'ready') return this.data.meta;
    const work = {
      meta: () => this.data.meta,
      window: () => this.data.window,
      event: () => this.event(parameters),
      search: () => this.search(parameters),
      selection: () => this.selection(parameters),
    }[name];
    return { state: 'ready', problems: [], ...work() };
  }

  /** All blocks that have a name: `visit(lane, index)`. */
  *blocks() {
    for (const lane of this.data.window.lanes)
      for (let index = 0; index < lane.row.length; index += 1) yield [lane, index];
  }

  rankOf(lane) {
    return this.data.meta.ranks.find((rank) => rank.lanes.some((one) => one.lane === lane));
  }

  event({ id, collective, rank }) {
    const link = this.data.window.links.find((one) =>
      collective == null
        ? one.parts.some((part) => part[3] === Number(id))
        : one.collective === Number(collective),
    );
    const wanted =
      collective == null
        ? Number(id)
        : (link?.parts.find((part) => part[0] === Number(rank))?.[3] ?? link?.parts[0][3]);
    const pieces = [...this.blocks()].filter(([lane, index]) => lane.id[index] === wanted);
    if (!pieces.length) throw new SourceError('this block is not in the report');
    const [lane, index] = pieces.at(-1);
    const placed = this.rankOf(lane.lane);
    const [start, end] = [pieces[0][0].start_ns[pieces[0][1]], lane.end_ns[index]];
    const step = this.data.meta.steps.find(
      (one) => one.rank === placed.rank && one.start_ns <= start && start < one.end_ns,
    );
    return {
      id: wanted,
      name: this.data.window.names[lane.name[index]],
      class: this.data.meta.classes[lane.class[index]],
      rank: placed.rank,
      lane: lane.lane,
      row: lane.row[index],
      lane_label: placed.lanes.find((one) => one.lane === lane.lane).label,
      step: step?.step ?? null,
      start_ns: start,
      end_ns: end,
      duration_ns: end - start,
      self_ns: null,
      exposed_ns: null,
      launched_by: null,
      parent: null,
      correlation: null,
      launch_to_start_ns: null,
      launches: null,
      collective: link ? this.collective(link) : null,
    };
  }

  collective(link) {
    const { links } = this.data.window;
    const at = links.indexOf(link);
    const ranks = link.parts.map(([rank, , , id, start, from, end]) => ({
      rank,
      id,
      start_ns: start,
      wait_ns: from - start,
      transfer_ns: end - from,
    }));
    const last = ranks.reduce((a, b) => (b.start_ns > a.start_ns ? b : a));
    return {
      collective: link.collective,
      kind: link.kind,
      group: null,
      seq: null,
      bytes: null,
      bus_gb_per_s: null,
      last_rank: last.rank,
      ranks,
      next: links[at + 1]?.collective ?? null,
      previous: links[at - 1]?.collective ?? null,
    };
  }

  search({ q, after_ns: after = 0 }) {
    const { names } = this.data.window;
    const found = [...this.blocks()]
      .filter(
        ([lane, index]) =>
          lane.name[index] >= 0 && names[lane.name[index]].toLowerCase().includes(q.toLowerCase()),
      )
      .map(([lane, index]) => ({
        id: lane.id[index],
        name: names[lane.name[index]],
        lane: lane.lane,
        row: lane.row[index],
        start_ns: lane.start_ns[index],
        end_ns: lane.end_ns[index],
      }));
    const events = found
      .filter((one) => one.start_ns >= after)
      .sort((a, b) => a.start_ns - b.start_ns)
      .slice(0, 200);
    return {
      total: found.length,
      events,
      names: [
        {
          name: q,
          count: found.length,
          total_ns: found.reduce((sum, one) => sum + one.end_ns - one.start_ns, 0),
        },
      ],
    };
  }

  selection({ from_ns: from, to_ns: to, lanes }) {
    const wanted = new Set(lanes.split(',').map(Number));
    const { classes, ranks } = this.data.meta;
    const names = new Map();
    const sums = new Map(
      ranks.map((rank) => [
        rank.lanes.find((lane) => lane.kind === 'overview')?.lane,
        { rank: rank.rank, idle_ns: to - from },
      ]),
    );
    for (const [lane, index] of this.blocks()) {
      const inside = Math.min(lane.end_ns[index], to) - Math.max(lane.start_ns[index], from);
      if (inside <= 0) continue;
      const share = inside / Math.max(1, lane.end_ns[index] - lane.start_ns[index]);
      const kind = classes[lane.class[index]];
      if (sums.has(lane.lane)) addClass(sums.get(lane.lane), kind, share * lane.busy_ns[index]);
      else if (wanted.has(lane.lane) && lane.name[index] >= 0)
        addName(names, this.data.window.names[lane.name[index]], kind, inside);
    }
    return {
      from_ns: from,
      to_ns: to,
      span_ns: to - from,
      ranks: [...sums.values()],
      names: [...names.values()].sort((a, b) => b.total_ns - a.total_ns).slice(0, 50),
    };
  }
}

function addClass(sum, kind, ns) {
  if (kind === 'idle') return;
  sum[`${kind}_ns`] = (sum[`${kind}_ns`] ?? 0) + ns;
  sum.idle_ns = Math.max(0, sum.idle_ns - ns);
}

function addName(names, name, kind, ns) {
  const key = `${kind} ${name}`; // a collective's waiting and its transfer are two sums
  const known = names.get(key) ?? { name, class: kind, count: 0, total_ns: 0 };
  names.set(key, { ...known, count: known.count + 1, total_ns: known.total_ns + ns });
}
