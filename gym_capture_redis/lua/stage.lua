-- Stores a part of a record that is too long for one step, before the put that needs it.
-- 1  incarnation of the attempt that the record belongs to
-- 2  how many bytes the part has
-- 3  name of the part, 16 bytes
-- 4  the part, or nothing: then HSETNX brings it in the same transaction, and _staged.lua comes last
-- Reply    OK | SAME (stored already) | FROZEN | RETIRED (also: another attempt, or no rollout)
-- Repeat   safe: SAME
local field, part = 'b:' .. arg(3), arg(4)

-- What the transaction brings must not be stored: HSETNX leaves a field that is there as it is. An empty one keeps it
-- out, and _staged.lua takes that away.
local function refuse(answer)
  if part == '' then redis.pcall('HSETNX', key, field, '') end
  return answer
end

local state, err = load_state()
if err then return refuse(err) end
if not state or state.incarnation ~= arg(1) or state.status == 'retired' then
  return refuse(reply('RETIRED', state))
end
if redis.call('HEXISTS', key, field) == 1 then return reply('SAME', state) end
if state.status == 'frozen' then return refuse(reply('FROZEN', state)) end
state.blocks = state.blocks + 1
state.bytes = state.bytes + arg(2)
local trace = next_step(state)
if part == '' then
  write(state, trace, '1:' .. arg(3) .. 'p:')
else
  write(state, trace, '1:' .. arg(3) .. 'p:', field, part)
end
return reply('OK', state)
