-- What every step on a rollout shares. scripts.py puts a line that defines FORMAT (the newest format this
-- version reads) in front, and the step itself, as a function `step`, and _each.lua behind.
--
-- Reply of every step: {code, incarnation, seq, version, ...}, or {'ERROR', text}, whose text begins with
-- CORRUPT, NEWER, or Redis' own WRONGTYPE. All errors come before any write.

local key, args -- of the entry at hand: its rollout, and the arguments that a step's header lists

local NUMBERS = {'version', 'seq', 'records', 'intents', 'failures', 'refusals', 'blocks', 'ids', 'bytes'}
local STATE_FORM = '^(%d+) ([%w-]+) (%l+) ([%w-]*) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$'
local NO_BLOCK = string.rep('\0', 16) -- in place of a block's name
local MOST_DIGITS = 15 -- of a number that Lua counts exactly
local MOST_ARGUMENTS = 4000 -- of one command: Lua has room for about 8,000 values

-- A snapshot id is given by the freeze and stays; a rollout may be retired without one.
local function valid_status(state)
  if state.status == 'open' then return state.snapshot == '' end
  return state.status == 'retired' or state.status == 'frozen' and state.snapshot ~= ''
end

local function parse_state(raw)
  local format = string.match(raw, '^(%d+) ')
  if format and #format <= MOST_DIGITS and tonumber(format) > FORMAT then
    return nil, {'ERROR', 'NEWER ' .. format}
  end
  local state, numbers = {}, {}
  format, state.incarnation, state.status, state.snapshot, numbers[1], numbers[2], numbers[3], numbers[4],
    numbers[5], numbers[6], numbers[7], numbers[8], numbers[9], state.ends = string.match(raw, STATE_FORM)
  local valid = format ~= nil and tonumber(format) == FORMAT and valid_status(state)
  for number, name in ipairs(NUMBERS) do
    valid = valid and #numbers[number] <= MOST_DIGITS
    state[name] = valid and tonumber(numbers[number])
  end
  if not valid then return nil, {'ERROR', 'CORRUPT the state of the rollout is unreadable'} end
  return state, nil
end

-- The rollout's state as a table, or nil where there is none; the second value is an error to answer.
local function load_state()
  local raw = redis.pcall('HGET', key, 's')
  if type(raw) == 'table' then return nil, {'ERROR', raw.err or 'CORRUPT the state cannot be read'} end
  if raw then return parse_state(raw) end
  if redis.call('EXISTS', key) == 0 then return nil, nil end
  return nil, {'ERROR', 'CORRUPT the rollout has no state'}
end

local function format_state(state)
  local words = {FORMAT, state.incarnation, state.status, state.snapshot}
  for number, name in ipairs(NUMBERS) do words[number + 4] = string.format('%.0f', state[name]) end
  words[#words + 1] = state.ends
  return table.concat(words, ' ')
end

-- A new rollout, which is there once its state is written.
local function new_state(incarnation)
  return {
    incarnation = incarnation, status = 'open', snapshot = '', version = 0, seq = 0, records = 0,
    intents = 0, failures = 0, refusals = 0, blocks = 0, ids = 0, bytes = 0, ends = '',
  }
end

-- Writes the state, and other fields with it: names and values in turn.
local function write(state, fields)
  fields = fields or {}
  fields[#fields + 1] = 's'
  fields[#fields + 1] = format_state(state)
  for from = 1, #fields, MOST_ARGUMENTS do
    redis.call('HSET', key, unpack(fields, from, math.min(#fields, from + MOST_ARGUMENTS - 1)))
  end
end

-- Values of fields, in the order of their names; false for those that are not there.
local function fetch(names)
  if #names <= MOST_ARGUMENTS then return redis.call('HMGET', key, unpack(names)) end
  local values = {}
  for from = 1, #names, MOST_ARGUMENTS do
    local to = math.min(#names, from + MOST_ARGUMENTS - 1)
    for _, value in ipairs(redis.call('HMGET', key, unpack(names, from, to))) do
      values[#values + 1] = value
    end
  end
  return values
end

local function reply(code, state, ...)
  if not state then return {code, '', 0, 0, ...} end
  return {code, state.incarnation, state.seq, state.version, ...}
end

-- Writes the failure of a call, as one step. The first reason stays: a put that met a conflict is
-- followed by a mark of the same call, which knows less.
local function mark_failure(state, call, failure_code)
  local field = 'f:' .. call
  state.seq = state.seq + 1
  state.version = state.version + 1
  local fields = {'o:' .. state.seq, '0:' .. field}
  if redis.call('HEXISTS', key, field) == 0 then
    local now = redis.call('TIME')
    local failed_ms = now[1] * 1000 + math.floor(now[2] / 1000)
    state.failures = state.failures + 1
    fields[3], fields[4] = field, string.format('%.0f ', failed_ms) .. failure_code
  end
  write(state, fields)
end

-- 1 if the rollout holds an entry, a mark or an intent, else 0.
local function holds(state)
  return state.records + state.failures + state.intents > 0 and 1 or 0
end

-- Replaces the rollout by its tombstone.
local function retire(state, ttl_s)
  redis.call('UNLINK', key)
  state.status = 'retired'
  state.records, state.intents, state.failures, state.refusals = 0, 0, 0, 0
  state.blocks, state.ids, state.bytes, state.ends = 0, 0, 0, ''
  write(state)
  redis.call('EXPIRE', key, ttl_s)
end

-- What a step wrote, by the trace it left: name of its field, names of its blocks (16 bytes each, in one
-- string); for an unreadable trace the trace itself, and nil.
local function read_trace(trace)
  local count, rest = string.match(trace or '', '^(%d+):(.*)$')
  local names_end = 16 * (tonumber(count) or 0)
  if not rest or names_end > #rest then return trace, nil end -- a damaged count must not be counted to
  return string.sub(rest, names_end + 1), string.sub(rest, 1, names_end)
end

-- Appends what the steps from number `from` on wrote to `rows`, up to about max_bytes and 1,000 steps:
-- {what the step wrote, its value, its index row (of a record), names of the blocks it brought, the blocks}.
-- Returns the number to go on from.
local function collect_rows(state, from, max_bytes, rows)
  local traces = {}
  for seq = from, math.min(state.seq, from + 999) do traces[#traces + 1] = 'o:' .. seq end
  if #traces == 0 then return from end
  traces = fetch(traces)
  local bytes, at = 0, 1
  while at <= #traces and (bytes < max_bytes or at == 1) do
    local field, names = read_trace(traces[at])
    local row = {field, false, false, names or '', {}}
    if names then
      local is_record = string.sub(field, 1, 2) == 'r:'
      if is_record and bytes > 0 then
        local size = redis.call('HSTRLEN', key, field) + 64 * #names
        if bytes + size > max_bytes then break end
      end
      local wanted = {field, is_record and 'i:' .. string.sub(field, 3) or field}
      for name_at = 1, #names, 16 do
        wanted[#wanted + 1] = 'b:' .. string.sub(names, name_at, name_at + 15)
      end
      local values = fetch(wanted)
      row[2], row[3] = values[1], is_record and values[2]
      bytes = bytes + (values[1] and #values[1] or 0)
      for number = 3, #wanted do
        row[5][number - 2] = values[number]
        bytes = bytes + (values[number] and #values[number] or 0)
      end
    end
    rows[#rows + 1] = row
    at = at + 1
  end
  return from + at - 1
end
